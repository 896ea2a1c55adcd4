"""`sok.callbacks.BackupAndRestore` in the middle of an epoch; oracle: a `fit` without a break."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import resuming
from tests.checks.resuming import BATCHES, KINDS, made, train

pytestmark = [pytest.mark.keras]


@pytest.fixture(autouse=True)
def initialized():
    sok.Init(global_batch_size=64, seed=7)


def check_same(model, expected):
    # Not by `predict_on_batch`, which under tf_keras wants `steps_per_execution` batches.
    found, wanted = (each(resuming.KEYS, training=False) for each in (model, expected))
    # A backup brings all rows of Adam up to date, which rounds.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def _kinds():
    """Each kind of data, and each way to read it with backups in the background."""
    few = ("plain", "arrays")
    for kind in (kind for kind, known in KINDS.items() if known):
        marks = [pytest.mark.keras(slow=kind not in few)]
        marks += [pytest.mark.slow] * (kind in ("repeated", "seeded"))
        yield pytest.param(kind, False, marks=marks, id=kind)
    for kind in ("plain", "stream"):
        marks = [pytest.mark.slow if kind == "plain" else pytest.mark.keras(slow=True)]
        yield pytest.param(kind, True, marks=marks, id=f"{kind} in the background")


@pytest.mark.parametrize("kind, background", _kinds())
def test_no_batch_is_trained_twice(kind, background, tmp_path):
    expected, batches, *_ = train(kind)
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
        check_same(model, expected)


def test_a_child_of_fork_ends_by_sigterm(tmp_path):
    """As the workers of a pool do that loads data, when the pool is closed."""
    callback = sok.callbacks.BackupAndRestore(tmp_path)
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


def test_it_goes_on_from_backup_to_backup(tmp_path):
    expected, batches, *_ = train("plain")
    trained = []
    for stop in (batches[3], batches[8], batches[11], None):
        model, seen, *_ = train("plain", tmp_path / "b", stop, save_freq=2)
        trained += seen
    assert len(trained) <= len(batches) + 3  # at most one interval again, each time
    check_same(model, expected)


@pytest.mark.parametrize("kind", ["plain", "unknown size", "stream"])
def test_a_backup_of_the_last_batch_begins_the_next_epoch(kind, tmp_path):
    expected, batches, *_ = train(kind)
    last = max(batch for epoch, batch in batches if epoch == 0)
    train(kind, tmp_path / "b", (1, 0), save_freq=last + 1)
    model, seen, epochs, said = train(kind, tmp_path / "b")
    assert seen[0] == (1, 0) and epochs == [1, 2] and not said
    check_same(model, expected)


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


def test_another_global_batch_size_begins_the_epoch_again(tmp_path, monkeypatch):
    train("plain", tmp_path / "b", (1, 2))
    module = "sok_like.callbacks.backup_and_restore.global_batch_size"
    monkeypatch.setattr(module, lambda: 32)
    _, seen, _, said = train("plain", tmp_path / "b")
    assert seen[0] == (1, 0) and "the global batch size was 64 and is 32" in said[0]


def test_fewer_batches_than_were_trained_raise(tmp_path, monkeypatch):
    train("plain", tmp_path / "b", (1, 4))
    monkeypatch.setattr(resuming, "KEYS", resuming.KEYS[:8])
    with pytest.raises(ValueError, match="5 batches that were trained.*Received: 2 batches"):
        train("plain", tmp_path / "b")


def test_another_loop_over_data_before_the_first_batch_raises(tmp_path):
    train("plain", tmp_path / "b", (1, 2))

    class Evaluates(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.evaluate(resuming.data("plain")["x"], verbose=0)

    backup = sok.callbacks.BackupAndRestore(str(tmp_path / "b"))
    model = made()
    arguments = {**resuming.data("plain"), "epochs": 3, "verbose": 0}
    if is_keras_3():
        with pytest.raises(RuntimeError, match="must begin with batch 3 of epoch 2"):
            model.fit(**arguments, callbacks=[backup, Evaluates()])
    else:  # the data is known before callbacks begin the epoch
        model.fit(**arguments, callbacks=[backup, Evaluates()])


def test_a_fit_that_raises_before_its_data_leaves_the_next_one_alone(tmp_path):
    train("plain", tmp_path / "b", (1, 2))

    class Raises(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise resuming.Interrupted

    backup = sok.callbacks.BackupAndRestore(str(tmp_path / "b"))
    with pytest.raises(resuming.Interrupted):
        made().fit(**resuming.data("plain"), epochs=3, verbose=0, callbacks=[backup, Raises()])
    _, seen, *_ = train("plain")
    assert seen[0] == (0, 0) and len(seen) == 3 * BATCHES


def test_a_loop_over_days_goes_on_in_its_day(tmp_path):
    def days(model, stop=None):
        recorded, seen = resuming.Recorded(stop), []
        for day in range(3):
            backup = sok.callbacks.BackupAndRestore(str(tmp_path / "b"), save_freq=1)
            model.fit(
                **resuming.data("plain"),
                initial_epoch=day,
                epochs=day + 1,
                verbose=0,
                callbacks=[backup, recorded],
            )
            seen.append(recorded.seen)
        return recorded.seen

    expected = made()
    batches = days(expected)
    with pytest.raises(resuming.Interrupted):
        days(made(), batches[8])
    model = made()
    assert days(model) == batches[9:]
    check_same(model, expected)


def test_a_second_fit_begins_at_its_beginning(tmp_path):
    train("plain", tmp_path / "b", (1, 2))
    model, *_ = train("plain", tmp_path / "b")
    _, seen, *_ = train("plain", model=model)
    assert seen[0] == (0, 0) and len(seen) == 3 * BATCHES


def test_a_backup_of_0_1_begins_its_epoch(tmp_path):
    """It has an epoch only."""
    model = made()
    before = model.predict_on_batch(resuming.KEYS)
    model.optimizer.build(model.trainable_variables)
    saved = tf.train.Checkpoint(model=model, epoch=tf.Variable(2, dtype=tf.int64))
    tf.train.CheckpointManager(saved, str(tmp_path / "b"), max_to_keep=1).save()
    restored, seen, epochs, said = train("plain", tmp_path / "b")
    assert seen[0] == (2, 0) and len(seen) == BATCHES and epochs == [2] and not said
    assert np.abs(restored.predict_on_batch(resuming.KEYS) - before).max() > 0


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("kind", resuming.KINDS_ON_RANKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_goes_on_where_two_were(on_processes, tmp_path, kind, ranks):
    (expected, rest), _ = on_processes(2, resuming.interrupted, kind, tmp_path / "b")
    copy = shutil.copytree(tmp_path / "b", tmp_path / "copy")  # the ranks still have the first
    for predicted, batches, said in on_processes(ranks, resuming.go_on, kind, copy):
        assert batches == rest and not said
        np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
