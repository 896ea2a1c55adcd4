"""`sok.callbacks.BackupAndRestore` in the middle of an epoch; oracle: a `fit` without a break."""

import contextlib
import functools
import os
import shutil
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks.files import Interrupted

pytestmark = [pytest.mark.keras]
BATCH, BATCHES = 4, 6
KEYS = np.random.default_rng(0).integers(0, 40, [BATCH * BATCHES, 2])
# Data of one `fit`, and whether a part of the epoch can be left out.
KINDS = {
    "plain": True,
    "unknown size": True,
    "stream": True,  # one pass over the data in three epochs
    "repeated": True,
    "seeded": True,
    "each epoch": False,
    "no seed": False,
    "overtaking": False,
    "arrays": True,
    "shuffled arrays": False,
    "sequence": True,
    "two at once": True,
}
ON_RANKS = [("stream", False), ("plain", True)]  # kinds, and whether in the background


def made(kind="plain"):
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    rows = sok.GroupEmbedding({"a": 4}, combiners="sum", name=f"resumed_{kind}".replace(" ", "_"))
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows({"a": keys})["a"]))
    # Keras counts the step that finds the end of data of unknown size, and Adam reads that count.
    rule = tf.keras.optimizers.Adagrad if kind == "unknown size" else tf.keras.optimizers.Adam
    optimizer = sok.OptimizerWrapper(rule(0.05))
    # Most eagerly: tracing a step takes longer than the steps of a training.
    traced = kind in ("unknown size", "two at once")
    steps = 2 if kind == "two at once" else 1
    model.compile(optimizer, "mse", steps_per_execution=steps, run_eagerly=not traced)
    model(KEYS[:1])
    return model


def sequence(keys, labels, size):
    base = getattr(tf.keras.utils, "PyDataset", None) or tf.keras.utils.Sequence

    class Batches(base):
        def __len__(self):
            return BATCHES

        def __getitem__(self, number):
            mine = slice(number * size, (number + 1) * size)
            return keys[mine], labels[mine]

    return Batches()


def data(kind):
    """Arguments of `fit`; on each rank its share."""
    ranks, rank = sok.size(), sok.rank()
    keys, size = KEYS[rank::ranks], BATCH // ranks
    labels = np.cos(keys.sum(1, keepdims=True)).astype(np.float32)
    if "arrays" in kind:
        return {"x": keys, "y": labels, "batch_size": size, "shuffle": kind != "arrays"}
    if kind == "sequence":
        return {"x": sequence(keys, labels, size), "shuffle": False}
    found = tf.data.Dataset.from_tensor_slices((keys, labels))
    if kind == "each epoch":
        found = found.shuffle(100, seed=7)
    if kind == "seeded":
        found = found.shuffle(100, seed=7, reshuffle_each_iteration=False)
    if kind == "no seed":
        tf.random.set_seed(None)
        found = found.shuffle(100, reshuffle_each_iteration=False)
    if kind == "overtaking":
        found = found.map(lambda *each: each, num_parallel_calls=2, deterministic=False)
    found = found.batch(size)
    if kind == "unknown size":
        found = found.filter(lambda keys, _: tf.reduce_max(keys) >= 0)
    if kind == "repeated":
        found = found.repeat()
    steps = {"stream": BATCHES // 3, "repeated": 4}.get(kind)
    return {"x": found, "steps_per_epoch": steps}


class Recorded(tf.keras.callbacks.Callback):
    """Notes the numbers of trained batches; ends the training behind one of them."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at, self.seen = stop_at, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.epoch, batch))
        if self.seen[-1] == self.stop_at:
            raise Interrupted


def train(kind, folder=None, stop_at=None, model=None, others=(), **options):
    """A `fit`; returns its model, the batches, the epochs that ended, and the warnings."""
    model = model or made(kind)
    recorded, callbacks = Recorded(stop_at), []
    if folder is not None:
        options = {"save_freq": 1, **options}
        callbacks = [sok.callbacks.BackupAndRestore(str(folder), **options)]
    epochs = []
    ended = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(Interrupted):
            callbacks += [*others, ended, recorded]
            model.fit(**data(kind), epochs=3, verbose=0, callbacks=callbacks)
    said = [str(each.message) for each in caught if "a second time" in str(each.message)]
    return model, recorded.seen, epochs, said


def break_off(kind, folder, stop, background):
    train(kind, folder, stop, background=background)
    for thread in threading.enumerate():
        if thread.name == "sok_dump":  # ended by the end of a process, which these ranks outlive
            thread.join()


def go_on(kind, folder):
    model, seen, _, said = train(kind, folder)
    return predicted(model), seen, said


# ---- tests ----


@pytest.fixture(autouse=True)
def initialized():
    sok.Init(global_batch_size=64, seed=7)


@functools.cache
def unbroken(kind):
    """What an unbroken `fit` predicts, and its batches."""
    model, batches, *_ = train(kind)
    return predicted(model), batches


def predicted(model):
    # Not by `predict_on_batch`, which under tf_keras wants `steps_per_execution` batches.
    return model(KEYS, training=False).numpy()


def check_same(found, expected):
    # A backup brings all rows of Adam up to date, which rounds.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory):
    """The backup of a `fit` that ended behind batch 3 of epoch 2."""
    sok.Init(global_batch_size=64, seed=7)
    folder = tmp_path_factory.mktemp("interrupted") / "b"
    train("plain", folder, (1, 2))
    return folder


@pytest.fixture
def interrupted(interrupted_once, tmp_path):
    return shutil.copytree(interrupted_once, tmp_path / "b")


def _kinds():
    """Each kind of data, and each way to read it with backups in the background."""
    few = ("plain", "arrays")
    for kind in (kind for kind, known in KINDS.items() if known):
        marks = [pytest.mark.keras(slow=kind not in few)]
        marks += [pytest.mark.slow] * (kind in ("repeated", "seeded"))
        yield pytest.param(kind, False, marks=marks, id=kind)
    yield pytest.param(
        *("stream", True), marks=[pytest.mark.keras(slow=True)], id="stream in the background"
    )


@pytest.mark.parametrize("kind, background", list(_kinds()))
def test_no_batch_is_trained_twice(kind, background, tmp_path):
    expected, batches = unbroken(kind)
    stops = batches[len(batches) // 2], batches[BATCHES // 2]
    # In a later epoch, and in the first one: both where data begins and goes on in another way.
    for stop in stops if kind in ("stream", "unknown size") else stops[:1]:
        folder = tmp_path / str(stop)
        train(kind, folder, stop, save_freq=1, background=background)
        model, seen, epochs, said = train(kind, folder)
        # A backup in the background may have been finished behind the batch before.
        first = batches.index(seen[0])
        assert first in (batches.index(stop) + 1, batches.index(stop) + 1 - background)
        assert (seen, said) == (batches[first:], [])
        assert epochs[-1] == 2 and not folder.exists()
        check_same(predicted(model), expected)


def test_a_child_of_fork_ends_by_sigterm(tmp_path):
    """As the workers of a pool do that loads data, when the pool is closed."""
    callback, before = sok.callbacks.BackupAndRestore(tmp_path), signal.getsignal(signal.SIGTERM)
    callback._listen()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the handler runs
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM and not callback._signalled
    finally:
        callback._stop_listening()
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_goes_on_from_backup_to_backup(tmp_path):
    expected, batches = unbroken("plain")
    trained = []
    for stop in (batches[3], batches[8], batches[11], None):
        model, seen, *_ = train("plain", tmp_path / "b", stop, save_freq=2)
        trained += seen
    assert len(trained) <= len(batches) + 3  # at most one interval again, each time
    check_same(predicted(model), expected)


@pytest.mark.parametrize("kind", ["plain", "unknown size", "stream"])
def test_a_backup_of_the_last_batch_begins_the_next_epoch(kind, tmp_path):
    expected, batches = unbroken(kind)
    last = max(batch for epoch, batch in batches if epoch == 0)
    train(kind, tmp_path / "b", (1, 0), save_freq=last + 1)
    model, seen, epochs, said = train(kind, tmp_path / "b")
    assert seen[0] == (1, 0) and epochs == [1, 2] and not said
    check_same(predicted(model), expected)


@pytest.mark.parametrize("kind", [kind for kind, known in KINDS.items() if not known])
def test_data_in_another_order_is_trained_again_and_says_so(kind, tmp_path):
    train(kind, tmp_path / "b", (1, 2))
    _, seen, _, said = train(kind, tmp_path / "b")
    assert seen[0] == (1, 0) and len(said) == 1
    assert "3 batches a second time" in said[0] and "epoch 2" in said[0]


def test_one_shuffled_epoch_goes_on(tmp_path):
    """The first order of a seeded `shuffle` is the same in every process."""
    train("each epoch", tmp_path / "b", (0, 2))
    _, seen, _, said = train("each epoch", tmp_path / "b")
    assert seen[0] == (0, 3) and not said


def test_another_global_batch_size_begins_the_epoch_again(interrupted, monkeypatch):
    module = "sok_like.callbacks.backup_and_restore.global_batch_size"
    monkeypatch.setattr(module, lambda: 32)
    _, seen, _, said = train("plain", interrupted)
    assert seen[0] == (1, 0) and "the global batch size was 64 and is 32" in said[0]


def test_fewer_batches_than_were_trained_raise(tmp_path, monkeypatch):
    train("plain", tmp_path / "b", (1, 4))
    monkeypatch.setitem(globals(), "KEYS", KEYS[:8])
    with pytest.raises(ValueError, match="5 batches that were trained.*Received: 2 batches"):
        train("plain", tmp_path / "b")


def test_another_loop_over_data_before_the_first_batch_raises(interrupted):
    class Evaluates(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.evaluate(data("plain")["x"], verbose=0)

    raised = pytest.raises(RuntimeError, match="must begin with batch 3 of epoch 2")
    # In tf_keras the data is known before callbacks begin the epoch.
    with raised if is_keras_3() else contextlib.nullcontext():
        train("plain", interrupted, others=[Evaluates()])


@pytest.mark.parametrize("raises", [False, True])
def test_a_second_fit_begins_at_its_beginning(interrupted, raises):
    """Also after one that has raised before its data."""

    class Raises(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Interrupted

    model, seen, *_ = train("plain", interrupted, others=[Raises()] if raises else ())
    assert bool(seen) != raises
    _, seen, *_ = train("plain", model=None if raises else model)
    assert seen[0] == (0, 0) and len(seen) == 3 * BATCHES


def test_a_loop_over_days_goes_on_in_its_day(tmp_path):
    def days(model, stop=None):
        recorded = Recorded(stop)
        for day in range(3):
            backup = sok.callbacks.BackupAndRestore(str(tmp_path / "b"), save_freq=1)
            day_of = {"initial_epoch": day, "epochs": day + 1}
            model.fit(**data("plain"), **day_of, verbose=0, callbacks=[backup, recorded])
        return recorded.seen

    expected = made()
    batches = days(expected)
    with pytest.raises(Interrupted):
        days(made(), batches[8])
    model = made()
    assert days(model) == batches[9:]
    check_same(predicted(model), predicted(expected))


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("kind, background", ON_RANKS)
def test_any_number_goes_on_where_two_were(on_processes, tmp_path, kind, background):
    expected, batches = unbroken(kind)
    stop = batches[len(batches) // 2]
    on_processes(2, break_off, kind, tmp_path / "b", stop, background)
    for ranks in (1, 2):
        copy = shutil.copytree(tmp_path / "b", tmp_path / f"copy{ranks}")  # the first is locked
        for predictions, seen, said in on_processes(ranks, go_on, kind, copy):
            first = batches.index(stop) + 1
            assert seen in (batches[first:], batches[first - background :]) and not said
            check_same(predictions, expected)
