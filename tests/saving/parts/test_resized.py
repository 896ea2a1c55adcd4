"""`sok.resized_tables`: rows of another width, from every kind of file."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import files
from tests.saving.format.test_folders import in_session
from tests.training import apply_gradient

KEYS, ROWS = [3, 5, 2**40], np.arange(6, dtype=np.float32).reshape(3, 2) + 1
EXPECTED = {
    ("pad", 3): np.pad(ROWS, [(0, 0), (0, 1)]),
    ("cut", 1): ROWS[:, :1],
    ("anew", 3): np.zeros([0, 3]),
}


class Layer(tf.keras.layers.Layer):
    def __init__(self, sok, dim, policies):
        super().__init__(name="layer")
        self.built = True
        option = sok.EmbeddingVariableOption(**policies)
        self.user = sok.EmbeddingVariable(dim, name="user", ev_option=option).as_weight()

    @property
    def table(self):
        return getattr(self.user, "_embedding_variable", self.user)

    def call(self, keys):
        return tf.nn.embedding_lookup(self.table, keys)


def model(sok, dim, **policies):
    inputs = tf.keras.Input([], dtype="int64")
    layer = Layer(sok, dim, policies or {"record_statistics": True})
    return tf.keras.Model(inputs, layer(inputs)), layer.table


KINDS = ("dump", "weights", "checkpoint")


def write(sok, kind, model, table, at):
    sok.Saver().dump_to_file(table, at) if kind == "dump" else files.write(model, at, [kind])


def read(sok, kind, model, table, at):
    sok.Saver().restore(table, at) if kind == "dump" else files.load(kind, model, at)


def step(sok, table):
    apply_gradient(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), table, [3])


def saved(sok, kind, at):
    written, table = model(sok, 2)
    step(sok, table)
    sok.assign(table, KEYS, ROWS)
    write(sok, kind, written, table, at)


@pytest.mark.keras
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice, dim", EXPECTED)
def test_rows_of_another_width(sok, tmp_path, kind, choice, dim):
    saved(sok, kind, tmp_path)
    loaded, table = model(sok, dim)
    sok.assign(table, [9], np.full([1, dim], 9.0))
    with pytest.raises(
        Exception, match=rf"(?i)table 'user' has rows of {dim} floats.*of 2; sok.resized"
    ):
        read(sok, kind, loaded, table, tmp_path)
    assert sok.export(table)[0].numpy().tolist() == [9]  # unchanged
    with sok.resized_tables({"user": choice}):
        read(sok, kind, loaded, table, tmp_path)
    keys, rows = sok.export(table)
    assert keys.numpy().tolist() == (KEYS if choice != "anew" else [])
    np.testing.assert_array_equal(rows, EXPECTED[choice, dim])
    if choice == "anew":
        return
    # The optimizer begins anew: the first step of Adam moves by its rate.
    before = table.find([3])[0].numpy()
    step(sok, table)
    np.testing.assert_allclose(table.find([3])[0], before - 0.1, rtol=1e-5)


def test_a_chain_of_deltas(sok, tmp_path):
    table, saver = sok.EmbeddingVariable(2, name="user"), sok.Saver()
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))  # moves all rows in each step
    sok.assign(table, KEYS, ROWS)
    for number in range(2):
        saver.dump(table, tmp_path, since="last" if number else None)
        apply_gradient(optimizer, table, [3])
    saver.dump(table, tmp_path, since="last")
    wider = sok.EmbeddingVariable(5, name="user")
    with sok.resized_tables({"user": "pad"}):
        saver.restore(wider, tmp_path)
    np.testing.assert_array_equal(sok.export(wider)[1][:, :2], sok.export(table)[1])
    assert not sok.export(wider)[1][:, 2:].numpy().any()
    with pytest.raises(RuntimeError, match="has rows of 5 floats"):
        saver.dump(wider, tmp_path, since="last")
    with pytest.raises(RuntimeError, match="has rows of 5 floats"):
        saver.compact(wider, tmp_path)


def test_choices_that_do_not_fit(sok, tmp_path):
    saved(sok, "dump", tmp_path)
    for dim, choice in ((3, "cut"), (1, "pad")):
        table = sok.EmbeddingVariable(dim, name="user")
        with pytest.raises(RuntimeError, match=f"rows of {dim} floats.*rows of 2.*'{choice}'"):
            with sok.resized_tables({"user": choice}):
                sok.Saver().restore(table, tmp_path)
        assert int(table.size()) == 0
    same = sok.EmbeddingVariable(2, name="user")
    with pytest.raises(ValueError, match=r"\['user'\], of which no file had such rows"):
        with sok.resized_tables({"user": "pad"}):
            sok.Saver().restore(same, tmp_path)
    for choices in ({}, {"user": "zeros"}, ["user"], {"user": None}):
        with pytest.raises(ValueError, match="`choices` must be"):
            with sok.resized_tables(choices):
                pass


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_an_int32_table_cannot_have(sok, tmp_path, kind):
    saved(sok, kind, tmp_path)
    narrow, table = model(sok, 2)
    table._options.key_dtype = "int32"
    with pytest.raises(Exception, match=rf"keys of int32. Received: a dump with key {2**40}"):
        read(sok, kind, narrow, table, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_begin_to_count(sok, tmp_path, capfd, kind):
    written, table = model(sok, 2, record_statistics=False)
    sok.assign(table, KEYS, ROWS)
    write(sok, kind, written, table, tmp_path)
    option = {"filter_option": sok.CounterFilter(2), "evict_option": sok.GlobalStepEvict(5)}
    loaded, filtered = model(sok, 2, **option)
    for _ in range(2):
        read(sok, kind, loaded, filtered, tmp_path)
    text = "sok_like: table 'user' is read from a file without frequencies and steps"
    assert capfd.readouterr().err.count(text) == 1
    np.testing.assert_array_equal(sok.export(filtered)[1], ROWS)
    assert filtered.get_frequency(KEYS).numpy().tolist() == [0] * 3
    filtered.set_step(5)
    assert int(filtered.evict()) == 0
    filtered.set_step(6)
    assert int(filtered.evict()) == 3  # steps count from 0


def test_in_a_session(sok, tmp_path):
    path = str(tmp_path / "ckpt")
    with in_session(sok, path):  # which saves a row of two ones for key 1
        pass
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(3, name="linked")
        session.run(table.initializer)
        exported, saver = sok.export(table), tf.compat.v1.train.Saver()
        with sok.resized_tables({"linked": "pad"}):
            saver.restore(session, path)
        keys, rows = session.run(exported)
    assert keys.tolist() == [1] and rows.tolist() == [[1, 1, 0]]
