"""Programs for SOK 1.x: stock optimizers in a scope, a dump, TensorFlow 1 in its own process."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from tests import forks
from tests.training import layer_of

pytestmark = pytest.mark.keras

DUMP_KEYS = np.array([7, 2, 2**40 + 1, 12, 5])
DUMP_ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)
FILE_KEYS = np.array([7, 2**32 - 1, 3, 9, 4])
ROWS = np.linspace(-1, 1, 20).astype(np.float32).reshape(5, 4)
STEPS = [[[3, 1], [1, 4]], [[2, 2], [0, 2]]]  # keys of each rank
WEIGHT = 0.5


def trained(weight=WEIGHT):
    """The rows and the weight after steps on all ranks' keys, by a stock optimizer for each."""
    variables = [tf.Variable(ROWS), tf.Variable(weight)]
    optimizers = [tf.keras.optimizers.Adam(0.1) for _ in variables]
    for keys in STEPS:
        with tf.GradientTape() as tape:
            rows = tf.gather(variables[0], [*keys[0], *keys[1]])
            loss = tf.reduce_sum(variables[1] * rows**2)
        gradients = tape.gradient(loss, variables)
        for optimizer, gradient, variable in zip(optimizers, gradients, variables, strict=True):
            # Keras 3 would square the parts of a row's gradient one by one.
            optimizer.apply_gradients([(tf.convert_to_tensor(gradient), variable)])
    return [variable.numpy() for variable in variables]


def test_a_dump_is_spread_over_the_ranks(on_threads, tmp_path):
    (tmp_path / "dumped_keys.file").write_bytes(DUMP_KEYS.astype("<i8").tobytes())
    (tmp_path / "dumped_values.file").write_bytes(DUMP_ROWS.astype("<f4").tobytes())

    def check():
        variable = sok.All2AllDenseEmbedding(None, 4, 1, 1, name="dumped").embedding_variable
        assert sok.Saver().restore_from_file(variable, str(tmp_path)).numpy() == b"OK"
        keys, rows = sok.export(variable)
        mine = DUMP_KEYS % 2 == sok.rank()
        order = np.argsort(DUMP_KEYS[mine])
        np.testing.assert_array_equal(keys, DUMP_KEYS[mine][order])
        np.testing.assert_array_equal(rows, DUMP_ROWS[mine][order])

    on_threads(2, check)


def dump_twice(folder):
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, name="filed", key_dtype="uint32")
    for rows in (2 * DUMP_ROWS, DUMP_ROWS):
        sok.assign(layer.embedding_variable, FILE_KEYS, rows)
        sok.Saver().dump_to_file(layer.embedding_variable, folder)


@pytest.mark.ranks
def test_a_dump_holds_the_files_that_sok_wrote(on_processes, tmp_path):
    """Of two dumps into one folder the second."""
    on_processes(2, dump_twice, str(tmp_path))
    keys = np.fromfile(tmp_path / "filed_keys.file", "<u4")
    rows = np.fromfile(tmp_path / "filed_values.file", "<f4").reshape(-1, 4)
    order, expected = np.argsort(keys), np.argsort(FILE_KEYS)
    np.testing.assert_array_equal(keys[order], FILE_KEYS[expected])
    np.testing.assert_array_equal(rows[order], DUMP_ROWS[expected])
    assert len(list(tmp_path.glob("*.file"))) == 2


@pytest.mark.ranks
def test_stock_optimizers_in_a_scope(on_processes):
    rows, weight = trained()
    for status, found, found_weight in on_processes(2, scope):
        assert status == b"OK"
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=5e-6)
        np.testing.assert_allclose(found_weight, weight, rtol=1e-5)


def scope():
    """Steps of stock optimizers as the tutorials take them; all rows, and the ordinary weight."""
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, dynamic_input=True, name="scoped")
    values = [ROWS[:2], ROWS[2:]]  # a block for each GPU, say
    status = sok.Saver().load_embedding_values(layer.embedding_variable, values)
    weight = tf.Variable(WEIGHT)
    table_optimizer, other_optimizer = (tf.keras.optimizers.Adam(0.1) for _ in range(2))

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * layer(keys) ** 2)
        tables, others = sok.split_embedding_variable_from_others(
            [*layer.trainable_variables, weight]
        )
        table_gradients, other_gradients = tape.gradient(loss, [tables, others])
        with sok.OptimizerScope(tables):
            table_optimizer.apply_gradients(
                zip(table_gradients, tables, strict=True), experimental_aggregate_gradients=False
            )
        other_gradients = [comm.current().sum(g, "sok1_weight") for g in other_gradients]
        other_optimizer.apply_gradients(zip(other_gradients, others, strict=True))

    for keys in STEPS:
        step(tf.constant(keys[sok.rank()], tf.int64))
    rows = layer(tf.range(5, dtype=tf.int64), training=False)
    return status.numpy(), rows.numpy(), weight.numpy()


def test_adam_in_a_graph_of_tf_1(on_threads):
    v1, (expected, _) = tf.compat.v1, trained(1.0)

    def check():
        with tf.Graph().as_default(), v1.Session() as session:
            layer = layer_of("in_a_session", None, 4, gradient_scale="sum")
            keys = v1.placeholder(tf.int64, [None])
            loss = tf.reduce_sum(layer(keys, training=True) ** 2)
            tables, _ = sok.split_embedding_variable_from_others(layer.trainable_variables)
            gradients = tf.gradients(loss, [layer.table])
            train = sok.optimizers.Adam(0.1).apply_gradients(zip(gradients, tables, strict=True))
            fill = sok.assign(layer.embedding_variable, np.arange(5), ROWS)
            rows = layer(tf.range(5, dtype=tf.int64), training=False)
            session.run(v1.global_variables_initializer())
            session.run(fill)
            for step in STEPS:
                session.run(train, {keys: step[sok.rank()]})
            np.testing.assert_allclose(session.run(rows), expected, rtol=1e-4, atol=5e-6)

    on_threads(2, check)


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
