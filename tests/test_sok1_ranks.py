"""Programs for SOK 1.x on two ranks: stock optimizers in a scope, a dump."""

import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm

pytestmark = [pytest.mark.keras, pytest.mark.ranks]

DUMP_KEYS = np.array([7, 2, 2**40 + 1, 12, 5])
DUMP_ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)
FILE_KEYS = np.array([7, 2**32 - 1, 3, 9, 4])
ROWS = np.linspace(-1, 1, 20).astype(np.float32).reshape(5, 4)
STEPS = [[[3, 1], [1, 4]], [[2, 2], [0, 2]]]  # keys of each rank
WEIGHT = 0.5


def dump():
    """A dump of SOK 1.x, restored: what each rank then holds."""
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, name="dumped")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "dumped_keys.file").write_bytes(DUMP_KEYS.astype("<i8").tobytes())
        (path / "dumped_values.file").write_bytes(DUMP_ROWS.astype("<f4").tobytes())
        status = sok.Saver().restore_from_file(layer.embedding_variable, folder)
    keys, rows = (tensor.numpy() for tensor in sok.export(layer.embedding_variable))
    return status.numpy(), keys, rows


def dumped_files():
    """The files of two dumps into one folder, read by rank 0 as SOK 1.x's programs read them."""
    variable = sok.All2AllDenseEmbedding(
        None, 4, 1, 1, name="filed", key_dtype="uint32"
    ).embedding_variable
    folder = pathlib.Path(tempfile.gettempdir()) / f"sok1_files_{os.getppid()}"
    for rows in (2 * DUMP_ROWS, DUMP_ROWS):
        sok.assign(variable, FILE_KEYS, rows)
        sok.Saver().dump_to_file(variable, str(folder))
    comm.current().barrier()  # another rank may still write
    keys = np.fromfile(folder / f"{variable.m_var_name}_keys.file", "<u4")
    rows = np.fromfile(folder / f"{variable.m_var_name}_values.file", "<f4")
    left = [path.name for path in folder.iterdir() if path.suffix not in (".npz", ".json")]
    comm.current().barrier()
    if comm.current().rank == 0:
        shutil.rmtree(folder)
    return keys, rows.reshape(-1, 4), sorted(left)


def scope():
    """Steps of stock optimizers as the tutorials take them; all rows, and the ordinary weight."""
    rank = comm.current().rank
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
        step(tf.constant(keys[rank], tf.int64))
    rows = layer(tf.range(5, dtype=tf.int64), training=False)
    return status.numpy(), rows.numpy(), weight.numpy()


def session():
    """Steps of SOK 1.x's Adam in a graph of TF 1: the rows of keys 0 to 4."""
    v1, rank = tf.compat.v1, comm.current().rank
    with tf.Graph().as_default(), v1.Session() as session:
        layer = sok.All2AllDenseEmbedding(
            *(None, 4, 1, 1), dynamic_input=True, gradient_scale="sum", name="in_a_session"
        )
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
            session.run(train, {keys: step[rank]})
        return session.run(rows)


def rows_only():
    """This rank's rows, before and after a new Adam's first step on rows restored without state."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"sok1_rows_{os.getppid()}"
    keys = tf.range(5, dtype=tf.int64)

    def step(table, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    trained, again = (sok.EmbeddingVariable(2, name="rows_only") for _ in range(2))
    optimizer = sok.tf.keras.optimizers.Adam(0.1)
    for _ in range(4):
        step(trained, optimizer)
    sok.Saver().dump_to_file(trained, str(folder))
    sok.Saver().restore_from_file(again, str(folder), rows_only=True)
    before = [sok.export(table)[1].numpy() for table in (trained, again)]
    step(again, sok.tf.keras.optimizers.Adam(0.1))
    comm.current().barrier()
    if comm.current().rank == 0:
        shutil.rmtree(folder)
    return (*before, sok.export(again)[1].numpy())


def test_a_dump_is_spread_over_the_ranks(on_processes):
    for rank, (status, keys, rows) in enumerate(on_processes(2, dump)):
        mine = DUMP_KEYS % 2 == rank
        order = np.argsort(DUMP_KEYS[mine])
        assert status == b"OK"
        np.testing.assert_array_equal(keys, DUMP_KEYS[mine][order])
        np.testing.assert_array_equal(rows, DUMP_ROWS[mine][order])


def test_a_dump_holds_the_files_that_sok_wrote(on_processes):
    for keys, rows, files in on_processes(2, dumped_files):
        order, expected = np.argsort(keys), np.argsort(FILE_KEYS)
        np.testing.assert_array_equal(keys[order], FILE_KEYS[expected])
        np.testing.assert_array_equal(rows[order], DUMP_ROWS[expected])
        assert files == ["filed_keys.file", "filed_values.file"]


def test_stock_optimizers_in_a_scope(on_processes):
    rows, weight = tf.Variable(ROWS), tf.Variable(WEIGHT)
    optimizers = [tf.keras.optimizers.Adam(0.1) for _ in range(2)]
    for keys in STEPS:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.gather(rows, [*keys[0], *keys[1]]) ** 2)
        gradients = tape.gradient(loss, [rows, weight])
        for optimizer, gradient, variable in zip(
            optimizers, gradients, [rows, weight], strict=True
        ):
            # Keras 3 would square the parts of a row's gradient one by one.
            optimizer.apply_gradients([(tf.convert_to_tensor(gradient), variable)])
    for status, found, found_weight in on_processes(2, scope):
        assert status == b"OK"
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=5e-6)
        np.testing.assert_allclose(found_weight, weight, rtol=1e-5)


def test_adam_in_a_graph_of_tf_1(on_processes):
    rows, optimizer = tf.Variable(ROWS), tf.keras.optimizers.Adam(0.1)
    for keys in STEPS:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(rows, [*keys[0], *keys[1]]) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, rows))
        optimizer.apply_gradients([(gradient, rows)])
    for found in on_processes(2, session):
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=5e-6)


def test_a_new_adam_begins_anew_on_rows_alone(on_processes):
    ranks = on_processes(2, rows_only)
    for trained, restored, after in ranks:
        np.testing.assert_array_equal(restored, trained)
        # Adam's first step is the learning rate, whatever the gradient.
        np.testing.assert_allclose(after, trained - 0.1, atol=1e-5)
    assert sum(len(trained) for trained, _, _ in ranks) == 5
