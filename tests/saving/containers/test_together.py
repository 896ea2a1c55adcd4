"""One call that restores several tables: one that cannot take its content costs none its own."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.emulated import asked_for

NAMES = ("a", "b")


def layers(sok, capacity, value):
    """Two tables; `b` may be small. An ordinary variable comes before and behind them."""
    inputs = tf.keras.Input([1], dtype="int64")
    hashed = [
        sok.DistributedEmbedding("sum", most, 2, slot_num=1, max_nnz=1, name=name)
        for name, most in zip(NAMES, (None, capacity), strict=True)
    ]
    start = tf.keras.initializers.Constant(value)
    outputs = [tf.keras.layers.Flatten()(layer(inputs)) for layer in hashed]
    outputs = [
        tf.keras.layers.Dense(1, kernel_initializer=start, name=f"dense_{name}")(output)
        for name, output in zip(NAMES, outputs, strict=True)
    ]
    return tf.keras.Model(inputs, outputs), [layer.embedding_variable for layer in hashed]


def filled(sok, tables, keys, value):
    for table in tables:
        sok.assign(table, list(keys), tf.fill([len(keys), 2], value))


def state(model, tables, sok):
    ordinary = [np.array(v) for v in model.variables if "dense" in getattr(v, "path", v.name)]
    assert len(ordinary) == 4
    return [np.asarray(part) for table in tables for part in sok.export(table)] + ordinary


def save_and_load(kind, folder):
    if kind == "weights":
        path = folder / "all.weights.h5"
        return (lambda model: model.save_weights(path)), (lambda model: model.load_weights(path))
    prefix = str(folder / "all")
    return (
        lambda model: tf.train.Checkpoint(model=model).write(prefix),
        lambda model: tf.train.Checkpoint(model=model).read(prefix),
    )


@pytest.mark.keras
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_table_without_room_leaves_all_tables_and_variables(sok, tmp_path, kind):
    save, load = save_and_load(kind, tmp_path)
    model, tables = layers(sok, None, 1.0)
    filled(sok, tables, range(20), 1.0)
    save(model)
    small, small_tables = layers(sok, 10, 5.0)
    filled(sok, small_tables, [1, 3], 5.0)
    before = state(small, small_tables, sok)
    # Keras gathers errors into one of its own.
    with pytest.raises((tf.errors.ResourceExhaustedError, ValueError), match="'b' holds at most"):
        load(small)
    for now, then in zip(state(small, small_tables, sok), before, strict=True):
        np.testing.assert_array_equal(now, then)

    again, again_tables = layers(sok, 20, 5.0)
    load(again)
    for now, then in zip(state(again, again_tables, sok), state(model, tables, sok), strict=True):
        np.testing.assert_array_equal(now, then)


def test_another_thread_restores_at_once(sok, tmp_path):
    from sok_like.saving import transaction
    from sok_like.saving.parts import hash_tables

    tables = [sok.EmbeddingVariable(2, name=name) for name in NAMES]
    filled(sok, tables, range(4), 1.0)
    saver = sok.Saver()
    for table in tables:
        saver.dump_to_file(table, tmp_path / table.table_name)
        table.clear()

    def read():
        part = hash_tables.HashTablePart(tables[0])
        transaction.prepare(part.prepare(str(tmp_path / part.name)))
        arguments = tables[1], tmp_path / tables[1].table_name
        thread = threading.Thread(target=saver.restore_from_file, args=arguments)
        thread.start()
        thread.join()
        return [int(table.size()) for table in tables]

    assert transaction.load("a test", None, read) == [0, 4]
    assert [int(table.size()) for table in tables] == [4, 4]


def test_the_same_of_a_saver_in_a_session(sok, tmp_path):
    path = str(tmp_path / "model")

    def run(capacity, value, use):
        with tf.Graph().as_default():
            init = sok.Init(global_batch_size=12, seed=7)
            tables = [
                sok.EmbeddingVariable(2, name=name, capacity=most)
                for name, most in zip(NAMES, (None, capacity), strict=True)
            ]
            ordinary = tf.compat.v1.get_variable("ordinary", initializer=value)
            keys = tf.compat.v1.placeholder(tf.int64, [None])
            rows = tf.fill([tf.size(keys), 2], value)
            fill = [sok.assign(table, keys, rows) for table in tables]
            content = [*map(sok.export, tables), ordinary.value()]
            saver = tf.compat.v1.train.Saver()
            with tf.compat.v1.Session() as session:
                session.run([init, tf.compat.v1.global_variables_initializer()])
                session.run([table.initializer for table in tables])
                return use(session, saver, lambda k: session.run(fill, {keys: k}), content)

    def save(session, saver, fill, content):
        fill(range(20))
        saver.save(session, path)
        return session.run(content)

    def fails(session, saver, fill, content):
        fill([1, 3])
        with pytest.raises(tf.errors.ResourceExhaustedError, match="'b' holds at most 10 keys"):
            saver.restore(session, path)
        return session.run(content)

    def loads(session, saver, fill, content):
        fill([1, 3])
        saver.restore(session, path)
        saver.restore(session, path)
        return session.run(content)

    saved, kept, loaded = run(None, 1.0, save), run(10, 5.0, fails), run(20, 5.0, loads)
    for keys, rows in kept[:2]:
        assert keys.tolist() == [1, 3] and (rows == 5.0).all()
    assert kept[2] == 5.0
    for now, then in zip(tf.nest.flatten(loaded), tf.nest.flatten(saved), strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.skipif(asked_for(), reason="what does not depend on the memory")
@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_the_same_of_sok2_load(sok, tmp_path, var_type):
    from sok_like import sok2

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
        for now, then in zip(read(tables), before, strict=True):
            np.testing.assert_array_equal(now, then)
    # Room for what is in the file and, without eviction, for what stays.
    again = make(20 if var_type == "hybrid" else 21, [19, 30], 5.0)
    sok2.load(tmp_path, again)
    assert set(range(20)) <= set(read(again)[2].tolist())
