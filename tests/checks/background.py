"""Dumps in the background of a table that trains, erases and evicts, by one rank and by two."""

import time
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.checks import files
from tests.checks.deltas import make, read, state, train, written_and_read
from tests.checks.files import shared, world


def checks(world_size):
    found = {"live": live, "failing": failing, "backup": backup}
    return found if world_size == 2 else {}


def write(kind, folder):
    """What the table held when the dump was begun, and how many steps were trained beside it."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.saving import background

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


def live():
    return written_and_read("background", write)


def failing():
    """Errors of `finish` where a rank's thread failed, on both ranks, and what is left after it."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.saving import background

    folder, saver = shared("background_failing"), sok.Saver()
    table, optimizer = make("dense")
    train(table, optimizer, range(2), "dense")
    saver.dump(table, folder)
    before, files = state(table), sorted(each.name for each in folder.iterdir())
    errors, own = [], background.BackgroundPart.write_file
    for rank in (0, 1):

        def fail(self, rank=rank):
            if comm.current().rank == rank:
                raise OSError(28, "No space left on device", "somewhere")
            own(self)

        background.BackgroundPart.write_file = fail
        dump = saver.begin_dump(table, folder)
        train(table, optimizer, [2], "dense")
        try:
            dump.finish()
        except RuntimeError as error:
            errors.append(str(error))
        background.BackgroundPart.write_file = own
        comm.current().barrier()
    left = sorted(each.name for each in folder.iterdir())
    return {
        "errors": errors,
        "left": left == files,
        "before": before,
        "read": state(read("dense", folder)[0]),
    }


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
    import sok_like as sok

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


def backup():
    """`BackupAndRestore(background=True)` on one rank and on two."""
    found = {}
    for ranks in (1, 2):
        with world(ranks) as group:
            if group is not None:
                found[ranks] = back_up(shared(f"background_backup{ranks}"))
    return found
