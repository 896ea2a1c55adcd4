"""A server that is refreshed again and again while threads ask it: no answer mixes versions."""

import concurrent.futures
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.emulated import on_host

pytestmark = on_host
REFRESHES = 1_000 if os.environ.get("SLOW") == "1" else 40
READERS, DIM, NUM_KEYS, ROWS = 3, 8, 400, 2_000


class Numbered(tf.Module):
    """Each row, and the weight, holds the number of its version; a row also holds its key."""

    def __init__(self, sok):
        super().__init__()
        self.table = sok.EmbeddingVariable(DIM, name="stressed", initializer="zeros")
        self.number = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
    def __call__(self, keys):
        return {"rows": tf.nn.embedding_lookup(self.table, keys), "number": self.number}

    def set(self, sok, version):
        """Some keys leave, others come; the rows of all others change."""
        gone, present = keys_of(version - 1), keys_of(version)
        self.table.erase(np.setdiff1d(gone, present))
        sok.assign(self.table, present, rows_of(present, version))
        self.number.assign(version)


def keys_of(version):
    """The keys of a version: the first half is always there, and the other half changes."""
    rng = np.random.default_rng(version)
    others = NUM_KEYS + rng.choice(ROWS - NUM_KEYS, NUM_KEYS, replace=False)
    return np.r_[np.arange(NUM_KEYS), others]


def rows_of(keys, version):
    """float32 `[num_keys, DIM]`: the number of the version, and keys from 1 on."""
    rows = np.full([len(keys), DIM], version, np.float32)
    rows[:, 1::2] = keys[:, np.newaxis] + 1
    return rows


def wrong(answer):
    """What is wrong with an answer for all keys; None if it is that of one version."""
    version = int(answer["number"])
    expected = np.zeros([ROWS, DIM], np.float32)
    present = keys_of(version)
    expected[present] = rows_of(present, version)
    at = np.flatnonzero((answer["rows"] != expected).any(1))
    if not len(at):
        return None
    return f"version {version}: key {at[0]} has row {answer['rows'][at[0]]}, and {len(at)} more"


def loaded_by_v2(path):
    """Functions that answer for keys, and that take a delta by its name."""
    signatures = tf.saved_model.load(str(path)).signatures
    serve, refresh = signatures["serving_default"], signatures["refresh"]
    return (
        lambda keys: {n: value.numpy() for n, value in serve(keys=tf.constant(keys)).items()},
        lambda name: refresh(delta=tf.constant(name)),
    )


def loaded_by_v1(path):
    """The same in a session, as in TensorFlow Serving."""
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(path)).signature_def
        serve, refresh = meta["serving_default"], meta["refresh"]
        outputs = {name: tensor.name for name, tensor in serve.outputs.items()}
        return (
            session.make_callable(outputs, [serve.inputs["keys"].name]),
            session.make_callable(refresh.outputs["version"].name, [refresh.inputs["delta"].name]),
        )


@pytest.mark.parametrize("load", [loaded_by_v2, pytest.param(loaded_by_v1, marks=pytest.mark.slow)])
def test_no_answer_mixes_versions(sok, tmp_path, load):
    model = Numbered(sok)
    model.set(sok, 1)
    path, folder = tmp_path / "model", tmp_path / "model.deltas"
    sok.export_saved_model(model, path, refreshable=True)
    serve, refresh = load(path)
    problems, versions, done = [], [[] for _ in range(READERS)], threading.Event()

    def read(mine):
        while not done.is_set() and not problems:
            try:
                answer = serve(np.arange(ROWS))
                problem = wrong(answer)
                mine.append(int(answer["number"]))
            except Exception as error:
                problem = repr(error)
            if problem:
                problems.append(problem)

    def newest():
        return max((mine[-1] for mine in versions if mine), default=0)

    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        readers.map(read, versions)
        try:
            for version in range(2, REFRESHES + 2):
                model.set(sok, version)
                sok.export_delta(model, folder / f"{version}")
                refresh(f"{version}")
                while newest() < version - 1 and not problems:  # readers keep up, if slowly
                    time.sleep(0.001)
                if problems:
                    break
        finally:
            done.set()
    assert not problems, problems
    for mine in versions:
        assert mine == sorted(mine)  # nobody goes back to an older version
    assert len(set().union(*versions)) > REFRESHES / 4
    last = serve(np.arange(ROWS))
    assert last["number"] == REFRESHES + 1 and wrong(last) is None


def test_two_calls_with_one_delta_apply_it_once(sok, tmp_path):
    model = Numbered(sok)
    path, folder = tmp_path / "model", tmp_path / "model.deltas"
    sok.export_saved_model(model, path, refreshable=True)
    _, refresh = loaded_by_v2(path)

    def is_applied(name):
        try:
            return bool(refresh(name))
        except tf.errors.InvalidArgumentError:
            return False

    for version in range(1, 30):
        model.set(sok, version)
        sok.export_delta(model, folder / f"{version}")
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            applied = list(threads.map(is_applied, [f"{version}"] * 3))
        assert sorted(applied) == [False, False, True]
