"""Graphs of v1 with tables, written or read as files, raise; others are as TensorFlow has them."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import sok_like
from sok_like.runtime.ranks import initialize

v1 = tf.compat.v1


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
