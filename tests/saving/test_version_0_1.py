"""Files in `tests/saving/version_0_1/`, which version 0.1 has written on two ranks.

They are a checkpoint and a file of weights of `made(1.0)`, and a checkpoint of `own(1.0)`.
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like import sok2
from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = [pytest.mark.ranks, pytest.mark.keras]

FOLDER = pathlib.Path(__file__).parent / "version_0_1"
ROWS, DIM = (20, 7), 4


def wholes(start):
    """The values of the dense tables."""
    return [start + np.arange(n * DIM, dtype=np.float32).reshape(n, DIM) for n in ROWS]


def made(start):
    """A model with dense tables, a hash table and a kernel; all values follow from `start`."""
    keys = [tf.keras.Input([2], dtype="int64") for _ in range(3)]
    tables = [tf.keras.layers.Embedding(n, DIM) for n in ROWS]
    dense = dmp.DistributedEmbedding(tables, name="old_dense")
    hashed = sok.DistributedEmbedding("sum", None, DIM, slot_num=2, max_nnz=1, name="old_hashed")
    flat = [tf.keras.layers.Flatten()(each) for each in (*dense(keys[:2]), hashed(keys[2]))]
    last = tf.keras.layers.Dense(1, name="old_last")
    model = tf.keras.Model(keys, last(tf.keras.layers.Concatenate()(flat)))
    dense.set_weights(wholes(start))
    last.kernel.assign(tf.fill(last.kernel.shape, float(start)))
    sok.assign(hashed.table, np.arange(9), tf.fill([9, DIM], float(start)))
    return model


def state(model):
    """Dense tables, keys and rows of this rank, and the kernel."""
    keys, rows = sok.export(model.get_layer("old_hashed").table)
    dense = model.get_layer("old_dense").get_weights(all_ranks=True)
    return [*dense, keys.numpy(), rows.numpy(), np.asarray(model.get_layer("old_last").kernel)]


def own(start):
    """A variable of which each rank has rows of its own."""
    rank = tf.constant(sok.rank(), tf.float32)
    variable = sok2.Variable(np.zeros([6, 2], np.float32), name="old_own")
    variable.assign(tf.fill(variable.shape, start + rank))
    return variable


def read_all():
    expected = state(made(1.0))
    if is_keras_3():  # which has written it; tf_keras names a model's parts apart
        for load in (
            lambda model: tf.train.Checkpoint(model=model).read(str(FOLDER / "model")),
            lambda model: model.load_weights(str(FOLDER / "model.weights.h5")),
        ):
            model = made(5.0)
            load(model)
            assert all(map(np.array_equal, state(model), expected))
    if sok.size() == 2:
        read = own(5.0)
        tf.train.Checkpoint(own=read).read(str(FOLDER / "own"))
        assert (read.numpy() == 1 + sok.rank()).all()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_of_version_0_1_are_read(on_processes, num_ranks):
    on_processes(num_ranks, read_all)
