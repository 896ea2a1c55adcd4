"""One call that restores several tables: one that cannot take its content costs none its own."""

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.saving import transaction
from sok_like.saving.parts import hash_tables
from tests.checks import files
from tests.emulated import on_host

NAMES = ("a", "b")
ODD = range(1, 20, 2)


def made(capacity, value, keys):
    """A model of two tables, of which `b` may be small, with ordinary variables; and its state."""
    inputs = tf.keras.Input([1], dtype="int64")
    start = tf.keras.initializers.Constant(value)
    tables, outputs = [], []
    for name, most in zip(NAMES, (None, capacity), strict=True):
        layer = sok.DistributedEmbedding("sum", most, 2, slot_num=1, max_nnz=1, name=name)
        rows = tf.keras.layers.Flatten()(layer(inputs))
        dense = tf.keras.layers.Dense(1, kernel_initializer=start, name=f"dense_{name}")
        tables, outputs = [*tables, layer.embedding_variable], [*outputs, dense(rows)]
    filled(tables, keys, value)
    model = tf.keras.Model(inputs, outputs)

    def state():
        ordinary = [np.array(v) for v in model.variables if "dense" in getattr(v, "path", v.name)]
        assert len(ordinary) == 4
        return [np.asarray(part) for table in tables for part in sok.export(table)] + ordinary

    return model, state


def filled(tables, keys, value):
    for table in tables:
        sok.assign(table, list(keys), tf.fill([len(keys), 2], value))


@pytest.mark.keras
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_table_without_room_leaves_all_tables_and_variables(
    on_threads, tmp_path, kind, world_size
):
    def check():
        model, state = made(None, 1.0, ODD)
        files.write(model, tmp_path, [kind])
        small, of_small = made(9, 5.0, [0, 1, 3])
        before = of_small()
        of_rank = "rank 1: .*" if world_size > 1 else ""
        # Keras 3 gathers errors of a file's objects into one of its own.
        gathered = ValueError if world_size == 1 else RuntimeError
        error = (tf.errors.ResourceExhaustedError, gathered)
        with pytest.raises(error, match=f"(?s){of_rank}'b' holds at most 9 keys"):
            files.load(kind, small, tmp_path)
        np.testing.assert_equal(of_small(), before)
        again, of_again = made(13, 5.0, [0, 1, 3])
        files.load(kind, again, tmp_path)
        np.testing.assert_equal(of_again(), state())

    on_threads(world_size, check)


@pytest.mark.usefixtures("sok")
def test_another_thread_restores_at_once(tmp_path):
    tables = [sok.EmbeddingVariable(2, name=name) for name in NAMES]
    filled(tables, range(4), 1.0)
    saver = sok.Saver()
    for table in tables:
        saver.dump_to_file(table, tmp_path / table.table_name)
        table.clear()

    def read():
        part = hash_tables.HashTablePart(tables[0])
        transaction.prepare(part.prepare(str(tmp_path / part.name)))
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            folder = tmp_path / tables[1].table_name
            threads.submit(saver.restore_from_file, tables[1], folder).result()
        return [int(table.size()) for table in tables]

    assert transaction.load("a test", None, read) == [0, 4]
    assert [int(table.size()) for table in tables] == [4, 4]


@pytest.mark.usefixtures("sok")
def test_the_same_of_a_saver_in_a_session(tmp_path):
    path = str(tmp_path / "model")

    def run(capacity, value, held, call):
        """What tables hold of these keys after the call."""
        with tf.Graph().as_default():
            init = sok.Init(global_batch_size=12, seed=7)
            tables = [
                sok.EmbeddingVariable(2, name=name, capacity=most)
                for name, most in zip(NAMES, (None, capacity), strict=True)
            ]
            ordinary = tf.compat.v1.get_variable("ordinary", initializer=value)
            rows = tf.fill([len(held), 2], value)
            fill = [sok.assign(table, list(held), rows) for table in tables]
            content = tf.nest.flatten([*map(sok.export, tables), ordinary.value()])
            saver = tf.compat.v1.train.Saver()
            with tf.compat.v1.Session() as session:
                session.run([init, tf.compat.v1.global_variables_initializer()])
                session.run([table.initializer for table in tables])
                session.run(fill)
                call(saver, session)
                return session.run(content)

    def fails(saver, session):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="'b' holds at most 10 keys"):
            saver.restore(session, path)

    def loads(saver, session):
        saver.restore(session, path)
        saver.restore(session, path)

    saved = run(None, 1.0, range(20), lambda saver, session: saver.save(session, path))
    kept, loaded = run(10, 5.0, [1, 3], fails), run(20, 5.0, [1, 3], loads)
    np.testing.assert_equal(kept, [np.array([1, 3]), np.full([2, 2], 5.0)] * 2 + [5.0])
    np.testing.assert_equal(loaded, saved)


@on_host
@pytest.mark.usefixtures("sok")
@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_the_same_of_sok2_load(tmp_path, var_type):
    def make(capacity, keys, value):
        tables = [
            sok2.DynamicVariable(2, name=name, var_type=var_type, max_capacity=most)
            for name, most in zip(NAMES, (100, capacity), strict=True)
        ]
        for table in tables:
            sok2.assign(table, list(keys), tf.fill([len(keys), 2], value))
        return tables

    def read(tables):
        return [np.asarray(part) for table in tables for part in sok2.export(table)]

    sok2.dump(tmp_path, make(100, range(20), 1.0))
    if var_type == "hbm":
        tables = make(19, [18, 19], 5.0)
        before = read(tables)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="'b' holds at most 19 keys"):
            sok2.load(tmp_path, tables)
        np.testing.assert_equal(read(tables), before)
    # Room for what is in the file and, without eviction, for what stays.
    again = make(20 if var_type == "hybrid" else 21, [19, 30], 5.0)
    sok2.load(tmp_path, again)
    assert set(range(20)) <= set(read(again)[2].tolist())
