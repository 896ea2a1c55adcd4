"""`sok.callbacks.ServeWhileTraining`, and a reader with stock TensorFlow that follows it."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests import emulated

pytestmark = pytest.mark.keras

BATCH, BATCHES = 200, 18
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, [BATCH * BATCHES, 2])
ASKED = np.r_[KEYS[::40, 0], 5, -5]  # some of them new, until late in the training


def made(name):
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64", name="keys")
    rows = sok.GroupEmbedding({"a": 4}, combiners="sum", name=name)({"a": keys})["a"]
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1)), "mse")
    return model


def data():
    found = tf.data.Dataset.from_tensor_slices((KEYS, np.ones([len(KEYS), 1], np.float32)))
    return sok.shard(found, drop_remainder=True).batch(BATCH // sok.size())


class _Wait(tf.keras.callbacks.Callback):
    """Lets the reader answer before the first batch, and now and then after it."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def on_train_batch_begin(self, batch, logs=None):
        if batch % 6 == 0:
            wait_for(lambda: len(read(self.answers)) > batch // 6)


def read(answers):
    lines = answers.read_text().splitlines() if answers.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(condition):
    limit = time.monotonic() + 300
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError("the reader does not answer")
        time.sleep(0.05)


def followed(world_size):
    """The reader's answers; where the SavedModels are; and a fresh export of the end."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"sok_live_{os.getppid()}_{world_size}"
    reader, answers = None, folder / "answers"
    if sok.rank() == 0:
        folder.mkdir()
        np.save(folder / "keys.npy", np.stack([ASKED, ASKED], 1))
        program = pathlib.Path(__file__).with_name("follower.py")
        # Stock TensorFlow: no rank, no package.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI", "PRTE"))}
        clean.pop("PYTHONPATH", None)
        reader = subprocess.Popen([sys.executable, str(program), str(folder)], cwd="/", env=clean)
    model = made(f"live_{world_size}")
    serve = sok.callbacks.ServeWhileTraining(folder / "models", every=3)
    callbacks = [serve, _Wait(answers)] if sok.rank() == 0 else [serve]
    try:
        model.fit(data(), verbose=0, callbacks=callbacks)
        sok.export_saved_model(model, folder / "fresh")
        if reader is not None:
            (folder / "end").touch()
            assert reader.wait(300) == 0
    finally:
        if reader is not None:
            reader.kill()
    places = sorted(path.name for path in (folder / "models").iterdir())
    by_time = sok.callbacks.ServeWhileTraining(
        folder / "models", every=datetime.timedelta(milliseconds=20)
    )
    model.fit(data(), verbose=0, callbacks=[by_time])
    newest = max(int(path.name) for path in (folder / "models").glob("*[0-9]"))
    deltas = len(list((folder / "models").glob(f"{newest}.deltas/*.index")))
    return {"folder": folder, "places": places, "answers": read(answers), "by_time": deltas}


@pytest.fixture(autouse=True)
def on_host():
    if emulated.asked_for():
        pytest.skip("deltas are of tables in host memory")


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stock_reader_follows_and_ends_with_the_answers_of_a_fresh_export(on_processes, ranks):
    found = on_processes(ranks, followed, ranks)
    first = found[0]
    fresh = tf.saved_model.load(str(first["folder"] / "fresh")).signatures["serving_default"]
    (expected,) = fresh(keys=tf.constant(np.stack([ASKED, ASKED], 1))).values()
    answers = first["answers"]
    np.testing.assert_array_equal(answers[-1]["answer"], expected)
    assert len(answers) >= 4 and len({str(each["answer"]) for each in answers}) >= 4
    # The first SavedModel has no room for the keys of three batches; the next ones fill up, too.
    newest = answers[-1]["version"]
    assert newest >= 3 and {each["version"] for each in answers} > {1}
    models = {str(newest - 1), str(newest)}
    assert models <= set(first["places"]) <= models | {f"{newest}.deltas"}
    assert first["by_time"] >= 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True, datetime.timedelta(0), "epoch"])
def test_an_interval_that_makes_no_sense_raises(every, tmp_path):
    with pytest.raises(ValueError, match="`every` must be a number of batches"):
        sok.callbacks.ServeWhileTraining(tmp_path, every=every)


def test_what_cannot_be_written_raises(tmp_path, monkeypatch):
    sok.Init(global_batch_size=64, seed=7)
    model = made("live_failing")
    (tmp_path / "models").write_text("a file")
    serve = sok.callbacks.ServeWhileTraining(tmp_path / "models", every=1)
    with pytest.raises(Exception, match="models"):
        model.fit(data().take(2), verbose=0, callbacks=[serve])
    serve = sok.callbacks.ServeWhileTraining(tmp_path / "others", every=1)

    def fail(model, path):
        raise ValueError(f"{path} could not be written: No space left on device")

    monkeypatch.setattr("sok_like.callbacks.serve_while_training.export_delta", fail)
    with pytest.raises(ValueError, match="No space left"):
        model.fit(data().take(2), verbose=0, callbacks=[serve])


def test_each_fit_begins_with_a_model_and_keeps_two(tmp_path):
    sok.Init(global_batch_size=64, seed=7)
    model = made("live_days")
    for day in range(3):
        serve = sok.callbacks.ServeWhileTraining(tmp_path, every=100, headroom=8.0)
        model.fit(data().skip(day).take(1), verbose=0, callbacks=[serve])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "3.deltas"]
