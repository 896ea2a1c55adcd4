"""A program of TensorFlow 1, after `tf.disable_v2_behavior()`, in a process of its own."""

import pytest

from tests import forks

pytestmark = pytest.mark.keras

PROGRAM = """
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
import sok_like as sok

init = sok.Init(global_batch_size=4, seed=7)
assert not sok.kit_lib.in_tensorflow2()
dense = sok.All2AllDenseEmbedding(8, 2, 2, 1, embedding_initializer="ones", name="dense")
sparse = sok.DistributedEmbedding("sum", 8, 2, 2, 3, embedding_initializer="ones", name="sparse")
keys = tf.constant([[[3], [1]], [[1], [5]]], tf.int64)
ids = tf.SparseTensor([[0, 0], [1, 0], [1, 1], [3, 2]], np.array([1, 2, 3, 4], np.int64), [4, 3])
outputs = tf.concat([dense(keys)[:, :, 0], sparse(ids)], axis=0)  # [4, slot_num, dim]
tables = [dense.table, sparse.table]
optimizer = tf.train.GradientDescentOptimizer(0.5)
gradients = tf.gradients(tf.reduce_sum(outputs), tables)
with sok.OptimizerScope(tables):
    train = optimizer.apply_gradients(list(zip(gradients, tables)))
status = sok.Saver().load_embedding_values(tables[0], [np.full([6, 2], 3.0, np.float32)])
with tf.Session() as session:
    session.run(init)
    session.run(tf.global_variables_initializer())
    assert session.run(status) == b"OK"
    before = session.run(outputs)
    session.run(train)
    after = session.run(outputs)
np.testing.assert_array_equal(before[:2], np.full([2, 2, 2], 3.0))
np.testing.assert_array_equal(before[2:, :, 0], [[1, 2], [0, 1]])
np.testing.assert_allclose(after[:2, :, 0], [[2.5, 2.0], [2.0, 2.5]])  # key 1 came twice
np.testing.assert_allclose(after[2:, :, 0], [[0.5, 1.0], [0.0, 0.5]])
"""


def test_layers_and_a_scope_in_a_session():
    done = forks.run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
