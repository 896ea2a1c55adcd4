"""`sok.callbacks.ServeWhileTraining`, and a server that follows it."""

import datetime
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from tests.emulated import on_host

pytestmark = [pytest.mark.keras, on_host]

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


class Reader(threading.Thread):
    """A server that follows: takes each SavedModel and delta below a folder, and answers."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.answers, self.ends = folder, [], threading.Event()

    def run(self):
        version, loaded, taken = 0, None, set()
        while True:
            ends, done = self.ends.is_set(), True
            models = [int(p.name) for p in self.folder.glob("*") if p.name.isdigit()]
            if max(models, default=0) > version:
                version, taken, done = max(models), set(), False
                loaded = tf.saved_model.load(str(self.folder / str(version)))
            for file in sorted((self.folder / f"{version}.deltas").glob("*.index")):
                if file.stem not in taken:
                    try:
                        loaded.signatures["refresh"](delta=tf.constant(file.stem))
                    except tf.errors.OpError:
                        break  # a new SavedModel has replaced the deltas
                    taken.add(file.stem)
                    done = False
            if not done:
                self.answers.append((version, answer(loaded)))
            if ends and done:
                return
            time.sleep(0.02)


def answer(loaded):
    (found,) = loaded.signatures["serving_default"](keys=np.stack([ASKED, ASKED], 1)).values()
    return found.numpy()


class Wait(tf.keras.callbacks.Callback):
    """Lets the reader answer before the first batch, and now and then after it."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def on_train_batch_begin(self, batch, logs=None):
        limit = time.monotonic() + 300
        while batch % 6 == 0 and len(self.reader.answers) <= batch // 6:
            if time.monotonic() > limit or not self.reader.is_alive():
                raise TimeoutError("the reader does not answer")
            time.sleep(0.05)


def followed(folder):
    model, callbacks = made(f"live_{sok.size()}"), []
    if sok.rank() == 0:
        reader = Reader(folder)
        reader.start()
        callbacks = [Wait(reader)]
    serve = sok.callbacks.ServeWhileTraining(folder, every=3, row_dtype="int8")
    model.fit(data(), verbose=0, callbacks=[serve, *callbacks])
    fresh = f"{folder}_fresh"
    sok.export_saved_model(model, fresh, row_dtype="int8")
    if sok.rank() == 0:
        reader.ends.set()
        reader.join(300)
        versions, answers = zip(*reader.answers, strict=True)
        np.testing.assert_array_equal(answers[-1], answer(tf.saved_model.load(fresh)))
        assert len({str(each) for each in answers}) >= 4
        # The first SavedModel has no room for the keys of three batches; the next ones fill up.
        newest = versions[-1]
        assert newest >= 3 and {*versions} > {1}
        models, found = {str(newest - 1), str(newest)}, {path.name for path in folder.iterdir()}
        assert models <= found <= models | {f"{newest}.deltas"}
    comm.current().barrier()
    every = datetime.timedelta(milliseconds=20)
    by_time = sok.callbacks.ServeWhileTraining(folder, every=every)
    model.fit(data().take(6), verbose=0, callbacks=[by_time])
    newest = max(int(path.name) for path in folder.glob("*[0-9]"))
    assert any(folder.glob(f"{newest}.deltas/*.index"))


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_server_follows_and_ends_with_the_answers_of_a_fresh_export(
    on_processes, tmp_path, ranks
):
    on_processes(ranks, followed, tmp_path / "models")


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
