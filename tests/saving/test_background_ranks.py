"""Dumps in the background of one and of two ranks, read by one and by two."""

import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving import background
from tests.checks import files
from tests.saving.test_deltas_ranks import (
    by_key,
    check_read,
    check_same,
    make,
    read,
    state,
    state_read,
    train,
)

pytestmark = [pytest.mark.ranks]


def write(kind, folder):
    """What the table held when the dump was begun, and how many steps were trained beside it."""
    saver, (table, optimizer) = sok.Saver(), make(kind)
    train(table, optimizer, range(2), kind)
    own = background.BackgroundPart.read_back
    late = lambda piece: (time.sleep(0.1 * comm.current().rank), own(piece))  # noqa: E731
    with mock.patch.object(background.BackgroundPart, "read_back", late):
        dump, at, step = saver.begin_dump(table, folder), state(table), 2
        while step < 6 or not dump.done:  # ranks whose threads end apart leave it together
            train(table, optimizer, [step], kind)
            step += 1
        dump.finish()
    found = {"at": at, "read": state(read(kind, folder)[0]), "steps": step}
    saver.dump(table, folder, since="last")
    return {**found, "later": state(table)}


def failing(folder):
    """A rank's thread fails: `finish` raises on both, and leaves what there was."""
    saver, (table, optimizer) = sok.Saver(), make("dense")
    train(table, optimizer, range(2), "dense")
    saver.dump(table, folder)
    before, names = state(table), sorted(each.name for each in folder.iterdir())
    own = background.BackgroundPart.write_file
    for rank in (0, 1):

        def fail(self, rank=rank):
            if comm.current().rank == rank:
                raise OSError(28, "No space left on device", "somewhere")
            own(self)

        with mock.patch.object(background.BackgroundPart, "write_file", fail):
            dump = saver.begin_dump(table, folder)
            train(table, optimizer, [2], "dense")
            with pytest.raises(RuntimeError, match=f"(?s)^rank {rank}: .*No space left"):
                dump.finish()
        comm.current().barrier()
    assert sorted(each.name for each in folder.iterdir()) == names
    for name, value in state_read("dense", folder).items():
        np.testing.assert_array_equal(value, before[name], name)


class _Stop(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            raise files.Interrupted


def built():
    model = files.made()
    model(files.X[:1])
    return model


def resume(model, callback):
    """What `fit` does first."""
    callback.set_model(model)
    callback.on_train_begin()
    callback._stop_listening()


def back_up(folder):
    """A training that is interrupted, and one that goes on from its backup."""
    model, saved, finished = built(), [], []
    callback = sok.callbacks.BackupAndRestore(
        str(folder), save_freq=1, sigterm_every=1, background=True
    )
    own, finish = callback._back_up, callback._finish

    def back_up():  # the state that a backup must have
        begun = [model.predict_on_batch(files.X), int(model.optimizer.iterations)]
        own()
        saved.append(begun)

    callback._back_up = back_up
    callback._finish = lambda: (finish(), finished.append(len(saved)))
    try:
        files.fit(model, 5, callbacks=[callback, _Stop()])
    except files.Interrupted:
        pass
    if callback._running is not None:
        callback._running.cancel()
    other = built()
    again = sok.callbacks.BackupAndRestore(str(folder), background=True, delete_checkpoint=False)
    resume(other, again)
    vectors, steps = saved[finished[-1] - 1]
    found = {
        "count": len(finished),
        "same": np.array_equal(other.predict_on_batch(files.X), vectors),
        "step": int(other.optimizer.iterations) - steps,
    }
    files.fit(other, 5, callbacks=[again])
    last = built()
    resume(last, sok.callbacks.BackupAndRestore(str(folder)))
    found["end"] = np.array_equal(last.predict_on_batch(files.X), other.predict_on_batch(files.X))
    return found


@pytest.mark.parametrize("kind", ["dense", "evicted"])
@pytest.mark.parametrize("writers", [1, 2])
def test_it_has_the_bits_of_its_instant_and_a_delta_follows(on_processes, tmp_path, kind, writers):
    found = on_processes(writers, write, kind, tmp_path)
    later, at, base = (by_key([of[name] for of in found]) for name in ("later", "at", "read"))
    check_same(base, at, f"{kind} {writers}")
    assert not np.array_equal(at["steps"], later["steps"])
    assert len({result["steps"] for result in found}) == 1
    check_read(on_processes, later, kind, tmp_path)


def test_an_error_of_one_rank_is_raised_on_both(on_processes, tmp_path):
    on_processes(2, failing, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_backup_in_the_background_has_the_state_of_its_step(on_processes, tmp_path, ranks):
    for found in on_processes(ranks, back_up, tmp_path):
        assert found["count"] >= 2 and found["same"] and found["end"], found
        assert found["step"] == 0
