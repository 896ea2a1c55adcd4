"""Ops and functions of the package in graphs: tracing, gradients of gradients, and files.

AutoGraph converts nothing of the package. Each of several tapes around a lookup gives its
gradients; a gradient of a table's gradient raises. Graphs of v1 with tables, written or read as
files, raise; others are as TensorFlow has them.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import sok_like

v1 = tf.compat.v1


@pytest.fixture
def converted(monkeypatch):
    """The modules of the functions that AutoGraph converts."""
    modules = set()
    convert = api._convert_actual

    def recording(entity, *args):
        modules.add(entity.__module__)
        return convert(entity, *args)

    monkeypatch.setattr(api, "_convert_actual", recording)
    return modules


@pytest.mark.keras
def test_a_step_converts_nothing_of_the_package(sok, converted):
    tables = [sok.EmbeddingVariable(4, name=f"table{i}") for i in range(2)]
    ids = [tf.ragged.constant([[1, 2], [3]], tf.int64)] * 2
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam())

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup_sparse(tables, ids, "sum", training=True)
            loss = tf.add_n([tf.reduce_sum(r) for r in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        if loss > 100.0:  # the user's own branch is converted
            loss = tf.zeros([])
        return loss

    step(ids)
    assert __name__ in converted
    assert not [m for m in converted if m.partition(".")[0] == "sok_like"]


ROWS = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]], np.float32)
KEYS = [0, 2, 2]  # of every rank


def table_of(sok, name):
    table = sok.EmbeddingVariable(2, name=name)
    sok.assign(table, np.arange(len(ROWS)), ROWS)
    return table


def look_up(table):
    return tf.nn.embedding_lookup(table, tf.constant(KEYS, tf.int64))


def check_by_key(results, expected):
    """Each rank's gradient has its own keys with what all ranks together make of their rows."""
    seen = {}
    for gradient in results:
        for key, row in zip(gradient.indices.numpy().tolist(), gradient.values, strict=True):
            assert key not in seen
            seen[key] = row
    assert sorted(seen) == sorted(set(KEYS))
    for key, row in seen.items():
        times = KEYS.count(key) * len(results)
        np.testing.assert_allclose(row, times * expected(ROWS[key]), rtol=1e-6)


@pytest.mark.parametrize("place", ["eager", "within", "around"])
def test_two_tapes_have_the_gradients_of_one(sok, on_threads, place):
    def check():
        table, factor = table_of(sok, f"two_tapes_{place}"), tf.Variable(2.0)
        find = tf.function(look_up, autograph=False) if place == "around" else look_up

        def step():
            with tf.GradientTape() as one, tf.GradientTape() as other:
                loss = factor * tf.reduce_sum(find(table) ** 2)
            return one.gradient(loss, factor), other.gradient(loss, table)

        of_factor, of_table = (tf.function(step) if place == "within" else step)()
        np.testing.assert_allclose(of_factor, (ROWS[KEYS] ** 2).sum(), rtol=1e-6)
        return of_table

    check_by_key(on_threads(2, check), lambda row: 2.0 * 2 * row)


@pytest.mark.parametrize("place", ["eager", "function"])
def test_gradients_of_gradients(sok, on_threads, place):
    """A penalty on the gradient of the rows is right; one on that of the table raises."""

    def check():
        table = table_of(sok, f"second_order_{place}")

        def penalty(of_rows):
            with tf.GradientTape() as outer:
                rows = look_up(table)
                with tf.GradientTape() as inner:
                    inner.watch(rows)
                    loss = tf.reduce_sum((rows if of_rows else look_up(table)) ** 3)
                gradient = inner.gradient(loss, rows if of_rows else table)
                penalty = tf.reduce_sum((gradient if of_rows else gradient.values) ** 2)
            return outer.gradient(penalty, table)

        call = tf.function(penalty) if place == "function" else penalty
        gradient = call(True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            call(False)
        return gradient

    # (d/dr sum (3 r^2)^2) = 36 r^3
    check_by_key(on_threads(2, check), lambda row: 36 * row**3)


@pytest.fixture
def session(graph):
    """A session whose graph has a variable of TensorFlow's; ops of tables are loaded."""
    with v1.Session() as session:
        init = sok_like.Init(global_batch_size=1, seed=1)
        v1.get_variable("w", initializer=np.float32([1, 2]))
        session.run(init)
        yield session


def output_of(table):
    ids = v1.placeholder(tf.int64, [None], name="ids")
    rows = tf.gather(v1.get_default_graph().get_collection("variables")[0], ids)
    if table:
        rows += tf.reduce_sum(tf.nn.embedding_lookup(sok_like.EmbeddingVariable(2, name="t"), ids))
    return {"ids": ids}, {"out": tf.identity(rows, name="out")}


@pytest.mark.parametrize("how", ["simple_save", "builder"])
def test_a_saved_model_of_a_session_would_hold_no_rows(session, tmp_path, how):
    inputs, outputs = output_of(table=True)
    session.run(v1.global_variables_initializer())
    path = str(tmp_path / "model")
    with pytest.raises(NotImplementedError, match=r"export_saved_model.*Received: .*\['t'\]"):
        if how == "simple_save":
            v1.saved_model.simple_save(session, path, inputs, outputs)
        else:
            builder = v1.saved_model.Builder(path)
            builder.add_meta_graph_and_variables(session, ["serve"])
    assert not list((tmp_path / "model").glob("**/*.pb"))


def test_files_of_graphs_without_tables_are_written_and_read(session, tmp_path):
    inputs, outputs = output_of(table=False)
    session.run(v1.global_variables_initializer())
    v1.saved_model.simple_save(session, str(tmp_path / "model"), inputs, outputs)
    path = v1.train.Saver().save(session, str(tmp_path / "saver"))
    with tf.Graph().as_default(), v1.Session() as other:
        v1.saved_model.load(other, ["serve"], str(tmp_path / "model"))
        assert other.run("out:0", {"ids:0": [1, 0]}).tolist() == [2, 1]
    with tf.Graph().as_default(), v1.Session() as other:
        v1.train.import_meta_graph(f"{path}.meta").restore(other, path)
        assert other.run(v1.global_variables()[0]).tolist() == [1, 2]


@pytest.mark.parametrize("scope", ["", "there"])
def test_a_graph_with_tables_is_not_read_from_a_file(session, tmp_path, scope):
    output_of(table=True)
    session.run(v1.global_variables_initializer())
    path = v1.train.Saver().save(session, str(tmp_path / "model"))
    words = rf"Saver\(\).restore\(session, path\).*the table '{'there/' * bool(scope)}t'"
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match=words):
        v1.train.import_meta_graph(f"{path}.meta", import_scope=scope or None)
