"""`sok.callbacks.BackupAndRestore`: continues interrupted training, on any number of ranks."""

import contextlib
import os
import signal
import sys
import threading
import types
from typing import Any

import tensorflow as tf

from sok_like.callbacks.resumed_data import Progress, Resumed
from sok_like.runtime.checks import as_integer, check_integer, require, unmet
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, check_same
from sok_like.runtime.ranks.initialize import global_batch_size
from sok_like.saving.background import BackgroundDump
from sok_like.saving.containers import checkpoints
from sok_like.saving.format import durable, folders

_CALL = "sok.callbacks.BackupAndRestore"
# 128 + SIGTERM: the status that a shell reports for a process ended by this signal.
_EXIT_CODE = 143


class BackupAndRestore(tf.keras.callbacks.Callback):
    """Backs up a `fit`, to its epoch and batch; the next one with the same folder goes on there.

    Differences from Keras' callback of this name: weights and progress are one checkpoint, so a
    killed process leaves the last finished backup intact. Any number of ranks may continue what any
    number wrote. After a SIGTERM, which schedulers send before they end a job, it makes a backup
    and exits with code 143. All ranks give the same folder, on a file system that they share.

    No batch is trained twice: the resumed `fit` gets the same data, reads the batches that were
    trained, and begins with the next one, under its own number. An epoch's metrics are then means
    over the rest of it. The epoch begins again, with a warning, if the data comes in another order
    (a `shuffle` without a seed, or with a new order in each epoch after the first, or arrays in a
    `fit` without `shuffle=False`), if `sok.Init` has another `global_batch_size`, or if it has
    another number of ranks that cannot divide this batch. The order is read from the `tf.data`
    pipeline; Python code that yields data must yield the same.

    Args:
        backup_dir: Folder of the backup; used for nothing else.
        save_freq: "epoch", or a number of batches.
        delete_checkpoint: Whether to remove the folder at the end of `fit`.
        sigterm_every: Number of batches after which ranks ask each other for a SIGTERM, and whether
            a backup in the background is written; one rank checks after every batch.
        background: Whether the tables are written while training goes on, as by
            `sok.Saver().begin_dump`. The backup is of the step at which it was begun. It counts
            soon after all ranks have written it, at the latest when the next one is due or `fit`
            ends. Tables must be in host memory.
        max_to_keep: Number of backups to keep. `sok.Saver().list` shows them, and `go_back` makes
            an earlier one the latest.

    Raises:
        ValueError: an argument is out of range, or the model is not built.
        RuntimeError: ranks have different folders, another job uses the folder, a rank could not
            write a backup, or a resumed `fit` does not begin behind it.
        SystemExit: after a SIGTERM and the backup.
    """

    def __init__(
        self,
        backup_dir: Any,
        save_freq: Any = "epoch",
        delete_checkpoint: bool = True,
        sigterm_every: int = 10,
        background: bool = False,
        max_to_keep: int = 1,
    ):
        super().__init__()
        require(bool(backup_dir), "backup_dir", "a folder", backup_dir)
        batches = as_integer(save_freq)
        required = '"epoch" or a number of batches >= 1'
        require(save_freq == "epoch" or (batches or 0) >= 1, "save_freq", required, save_freq)
        self._sigterm_every = check_integer("sigterm_every", sigterm_every)
        self._max_to_keep = check_integer("max_to_keep", max_to_keep)
        require(isinstance(background, bool), "background", "True or False", background)
        self.backup_dir, self.delete_checkpoint = os.fspath(backup_dir), bool(delete_checkpoint)
        self._batches, self._background = batches, background
        self._running: BackgroundDump | None = None
        self._seen, self._signalled, self._previous = 0, False, None
        self._progress, self._saved, self._is_later = Progress(), None, False
        self._resumed: Resumed | None = None
        self._lock: folders.Lock | None = None

    # ---- restoring ----

    def on_train_begin(self, logs=None):
        if not self.model.built:
            required = "be built before it can be restored: call it on a batch first"
            raise unmet("A model", required, f"model '{self.model.name}', which is not built")
        optimizer = self.model.optimizer
        if optimizer is not None and hasattr(optimizer, "build"):
            optimizer.build(self.model.trainable_variables)
        self._variable = tf.Variable(Progress(), dtype=tf.int64, trainable=False, name="progress")
        self._checkpoint = tf.train.Checkpoint(model=self.model, progress=self._variable)
        communicator = comm.current()
        dirs = agreed(lambda: self.backup_dir, communicator, _CALL)
        check_same(dirs, "`backup_dir` must be the same folder on all ranks")
        if self._running is not None:  # of a `fit` that raised
            self._running.cancel()
            self._running = None

        def latest_backup():
            if communicator.rank == 0:
                durable.make_folder(self.backup_dir)
                self._lock = folders.lock(self.backup_dir, "backup_dir")
            of_manager = self._checkpoint, self.backup_dir, self._max_to_keep
            self._manager = tf.train.CheckpointManager(*of_manager)
            return self._manager.latest_checkpoint

        latest = agreed(latest_backup, communicator, _CALL)
        check_same(latest, "`backup_dir` must be on a file system that all ranks share")
        of_fit, ranks = self.params or {}, communicator.world_size
        samples, epochs = global_batch_size(), of_fit.get("epochs", 0)
        now = Progress(epochs=epochs, global_batch_size=samples, ranks=ranks)
        saved = now
        if latest[0] is not None:
            self._checkpoint.restore(latest[0]).assert_existing_objects_matched()
            saved = Progress(*self._variable.numpy().tolist())
        if saved.batch and saved.batch == of_fit.get("steps"):
            # After a SIGTERM in the last batch. Neither Keras wants an epoch without batches.
            saved = saved._replace(epoch=saved.epoch + 1, batch=0)
        goes_on = saved.epoch < saved.epochs and saved.taken  # that `fit` had not come to its end
        self._resumed = Resumed(saved, now) if goes_on else None
        self._progress, self._saved = now, None
        self._is_later = saved[:2] > (now.epochs, 0)  # than the end of this `fit`, which is empty
        self._begin_at(saved)
        self._listen()

    def _begin_at(self, saved):
        if is_keras_3():
            self.model._initial_epoch = saved.epoch
            return

        def counters(steps_per_epoch, initial_epoch, mode):
            if self._resumed is not None:
                self._resumed.wait_for_data()
            return saved.epoch, 0  # the data decides on the step

        # tf_keras' `fit` asks such an object for the first epoch.
        state = types.SimpleNamespace(maybe_load_initial_counters_from_ckpt=counters)
        self.model._training_state = state if any(saved[:2]) else None

    def _go_on(self, batch=None):
        """At the first batch of a resumed `fit`, or at the end of an epoch that has no more."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.check(batch)
            self._progress = self._progress._replace(taken=resumed.taken)

    # ---- backing up ----

    def _back_up(self, background):
        """Makes a backup, or begins one."""
        if background:
            self._finish()  # the next one waits for it
        self._variable.assign(self._progress)
        self._saved = self._progress
        if not background:
            self._manager.save()
            return
        path = f"{self._manager._prefix}-{int(self._checkpoint.save_counter) + 1}"
        self._running = checkpoints.begin(self._checkpoint, path, self._manager.save)

    def _finish(self):
        running, self._running = self._running, None
        if running is not None:
            running.finish()

    def on_epoch_begin(self, epoch, logs=None):
        is_first = int(self._progress.taken == 0)
        self._progress = self._progress._replace(epoch=epoch, batch=0, is_first=is_first)
        if self._resumed is not None and is_keras_3():
            self._resumed.wait_for_data()

    def on_epoch_end(self, epoch, logs=None):
        self._go_on()
        last = self._progress
        self._progress = last._replace(epoch=epoch + 1, batch=0)
        # A backup of the epoch's last batch cannot know that it is the last.
        if self._batches is None or self._saved == last:
            self._back_up(self._background)
        self._ask_ranks()

    def on_train_batch_begin(self, batch, logs=None):
        self._go_on(batch)
        self._progress = self._progress._replace(batch=batch)

    def on_train_batch_end(self, batch, logs=None):
        self._seen += 1
        count = batch + 1 - self._progress.batch  # `steps_per_execution`
        taken = self._progress.taken + count
        self._progress = self._progress._replace(batch=batch + 1, taken=taken)
        if self._batches is not None and self._seen % self._batches == 0:
            self._back_up(self._background)
        if comm.current().world_size == 1 or self._seen % self._sigterm_every == 0:
            self._ask_ranks()

    def on_train_end(self, logs=None):
        self._stop_listening()
        self._finish()
        if self.delete_checkpoint and not self._is_later:
            communicator = comm.current()
            agreed(None, communicator, f"the end of {_CALL}")
            if communicator.rank == 0:
                with contextlib.suppress(OSError):
                    # First what names the backup: an interrupt leaves none, and no half of one.
                    durable.remove(durable.join(self.backup_dir, "checkpoint"))
                    durable.remove_folder(self.backup_dir)
            # No rank continues, perhaps with another `fit`, before the folder is removed.
            agreed(None, communicator, "the removal of the backup")
        self._lock = self._resumed = None
        self._begin_at(Progress())  # another `fit` of the model begins at the beginning

    # ---- SIGTERM ----

    def _listen(self):
        self._signalled = False
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def _stop_listening(self):
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_signal(self, number, frame):
        # The second one, or after a `fit` that raised, or in a child of fork: end at once.
        if self._signalled or os.getpid() != self._process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._signalled = True

    def _ask_ranks(self):
        """Finishes a backup that all ranks have written; ends training after a SIGTERM."""
        communicator, running = comm.current(), self._running

        def state():
            of_backup = [False, False] if running is None else [running.ended, running.failed]
            return [self._signalled, *of_backup]

        states = agreed(state, communicator, _CALL)
        signalled, done, failed = zip(*states, strict=True)
        if all(done) or any(failed) or any(signalled):
            self._finish()
        if not any(signalled):
            return
        self._back_up(background=False)
        if communicator.rank == 0:
            print(
                f"SIGTERM on rank {signalled.index(True)}: saved to {self.backup_dir}; the next "
                f"fit with this folder continues with epoch {self._progress.epoch + 1}, batch "
                f"{self._progress.batch + 1}.",
                file=sys.stderr,
                flush=True,
            )
        agreed(None, communicator, "the exit after SIGTERM")
        self._stop_listening()
        raise SystemExit(_EXIT_CODE)
