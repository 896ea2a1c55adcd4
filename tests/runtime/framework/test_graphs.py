"""Ops and functions of the package in graphs: tracing, gradients of gradients, and files.

AutoGraph converts nothing of the package. Each of several tapes around a lookup gives its
gradients; a gradient of a table's gradient raises. Graphs of v1 with tables, written or read as
files, raise; others are as TensorFlow has them.
"""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import sok_like
from sok_like.runtime.ranks import initialize
from tests.checks.tapes import KEYS, ROWS

v1 = tf.compat.v1
each_world = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])


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


def check_by_key(results, expected):
    """Each rank's gradient has its own keys with what all ranks together make of their rows."""
    seen = {}
    for gradient in results:
        for key, row in gradient.items():
            assert key not in seen
            seen[key] = row
    assert sorted(seen) == sorted(set(KEYS))
    for key, row in seen.items():
        times = KEYS.count(key) * len(results)
        np.testing.assert_allclose(row, times * expected(ROWS[key]), rtol=1e-6)


@each_world
@pytest.mark.parametrize("place", ["eager", "within", "around"])
def test_two_tapes_have_the_gradients_of_one(rank_results, world_size, place):
    results = [result[place] for result in rank_results(world_size, "tapes.two_tapes")]
    for of_factor, _ in results:
        np.testing.assert_allclose(of_factor, (ROWS[KEYS] ** 2).sum(), rtol=1e-6)
    check_by_key([of_table for _, of_table in results], lambda row: 2.0 * 2 * row)


@each_world
@pytest.mark.parametrize("place", ["eager", "function"])
def test_a_gradient_of_a_tables_gradient_raises(rank_results, world_size, place):
    for result in rank_results(world_size, "tapes.second_order"):
        assert "cannot be differentiated again" in result[place][1]


@each_world
@pytest.mark.parametrize("place", ["eager", "function"])
def test_a_gradient_of_the_rows_gradient_is_right(rank_results, world_size, place):
    # (d/dr sum (3 r^2)^2) = 36 r^3
    results = rank_results(world_size, "tapes.second_order")
    check_by_key([result[place][0] for result in results], lambda row: 36 * row**3)


@pytest.fixture
def session():
    """A session whose graph has a variable of TensorFlow's; ops of tables are loaded."""
    initialize.reset()
    with tf.Graph().as_default(), v1.Session() as session:
        init = sok_like.Init(global_batch_size=1, seed=1)
        v1.get_variable("w", initializer=np.float32([1, 2]))
        session.run(init)
        yield session
    initialize.reset()


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


def test_a_saved_model_without_tables_is_written_and_read(session, tmp_path):
    inputs, outputs = output_of(table=False)
    session.run(v1.global_variables_initializer())
    path = str(tmp_path / "model")
    v1.saved_model.simple_save(session, path, inputs, outputs)
    with tf.Graph().as_default(), v1.Session() as other:
        v1.saved_model.load(other, ["serve"], path)
        assert other.run("out:0", {"ids:0": [1, 0]}).tolist() == [2, 1]


READING = """
import sys
import tensorflow.compat.v1 as tf
import sok_like as sok

tf.disable_eager_execution()
with tf.Session() as session:
    session.run(sok.Init(global_batch_size=1))
    try:
        tf.train.import_meta_graph(sys.argv[1], import_scope=sys.argv[2] or None)
    except NotImplementedError as error:
        print(error)
"""


@pytest.mark.parametrize("scope", ["", "there"])
def test_a_graph_with_tables_is_not_read_from_a_file(session, tmp_path, scope):
    output_of(table=True)
    session.run(v1.global_variables_initializer())
    path = v1.train.Saver().save(session, str(tmp_path / "model"))
    command = [sys.executable, "-c", READING, f"{path}.meta", scope]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name = f"{scope}/t" if scope else "t"
    assert "Saver().restore(session, path)" in said and f"the table '{name}'" in said


def test_a_graph_without_tables_is_read_from_a_file(session, tmp_path):
    output_of(table=False)
    session.run(v1.global_variables_initializer())
    path = v1.train.Saver().save(session, str(tmp_path / "model"))
    with tf.Graph().as_default(), v1.Session() as other:
        v1.train.import_meta_graph(f"{path}.meta").restore(other, path)
        assert other.run(v1.global_variables()[0]).tolist() == [1, 2]
