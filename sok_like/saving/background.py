"""Dumps that are written while training goes on.

    begin_dump   all ranks, between two steps: the instant of the dump. Nothing is written yet
    a thread     writes this rank's file | reads back the file that another rank has written
    finish       all ranks: the manifest

A row that changes while the thread writes is copied first (`cpp/core/cpu/instant.h`), so the file
has the rows of the instant. The threads make no collective calls.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.ranks import agreement, comm
from sok_like.saving.format import checksums, durable, manifest, shard_file
from sok_like.saving.parts.checkpointable import rank_to_read_back
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.saving.parts.table_dumps import GrowingDump
from sok_like.table import table_reader

CALL, _DONE = "a dump in the background", "`done` of a dump in the background"
# Dumps that are neither finished nor given up.
_running: weakref.WeakSet = weakref.WeakSet()


class BackgroundPart(HashTablePart):
    """A table of which a thread writes a dump into a folder."""

    following = ()

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._entry: dict[str, Any] = {}
        self._reader: Any = None
        self._stopped = threading.Event()

    # On every rank, in this order; the two in the middle by the thread.

    def open(self) -> None:
        """The instant of the dump. Nothing is read yet."""
        # The thread asks nobody: a program may have several communicators.
        here = comm.current()
        self._own_file = self.file(here.rank)
        self._other_file = self.file(rank_to_read_back()) if here.world_size > 1 else ""
        number = int(self.table.register_for_read())
        self._reader = table_reader.TableReader(number, 0, beside=True)
        self.instant = self._reader.instant

    def write_file(self) -> None:
        with contextlib.closing(self._reader):
            self._check_stopped()
            shard = self._reader.shard(self.table.dim)
            self.step, shard.erased, read = int(shard.optimizer_step), None, shard.read

            def parts(num_rows):
                for part in read(num_rows):
                    self._check_stopped()
                    yield part

            shard.read = parts
            with durable.explaining(self.name):
                self._entry = shard_file.write_shard(self.folder, self._own_file, shard)

    def read_back(self) -> None:
        """Reads what another rank has written, once it is there."""
        if not self._other_file:
            return
        path = durable.join(self.folder, self._other_file)
        while not durable.exists(path):
            self._check_stopped()
            time.sleep(0.05)
        self.read_checksum = checksums.of_file(path)

    def write(self) -> dict[str, Any]:
        return self._entry

    def remove(self) -> None:
        manifest.remove_unlisted(self.folder, self.name, self._own_file)

    def hurry(self) -> None:
        """Somebody waits for the dump, so the thread does not rest any more."""
        if self._reader is not None:
            self._reader.hurry()

    def close(self) -> None:
        """Frees what the table keeps for it."""
        if self._reader is not None:
            self._reader.close()

    def _check_stopped(self):
        if self._stopped.is_set():
            raise RuntimeError(f"The dump of table '{self.name}' was given up")


class BackgroundTableDump(BackgroundPart, GrowingDump):
    """The same, as a dump in a folder of the user's."""


class BackgroundDump:
    """A dump that is written while training goes on: what `sok.Saver().begin_dump` returns."""

    # `parts` are in the same order on all ranks. `publish` makes their files the dump.

    def __init__(self, parts: Sequence[BackgroundPart], publish: Callable[[], Any]):
        self._parts, self._publish = list(parts), publish
        self._written, self._result = threading.Event(), None
        self._error: BaseException | None = None
        self._failed: Exception | None = None
        self._ending, self._done = threading.RLock(), False
        self._text = f"The dump in the background of tables {[part.name for part in parts]}"
        self._thread = threading.Thread(target=self._run, name="sok_dump", daemon=True)
        try:
            agreement.Steps(CALL).take(lambda: list(map(BackgroundPart.open, parts)))
            for part in parts:
                vars(part.table)["running_dump"] = self
            _running.add(self)
            self._thread.start()
        except BaseException:
            self._give_up(remove=False)
            raise

    def _run(self):
        try:
            for part in self._parts:
                part.write_file()
            self._written.set()
            for part in self._parts:
                part.read_back()
        except BaseException as error:
            self._error = error
        finally:
            for part in self._parts:
                part.close()
            self._written.set()

    @property
    def done(self) -> bool:
        """Whether all ranks have written their files, or failed; all ask at the same step."""
        if not self._done and self in _running:
            self._done = all(agreement.agreed(lambda: self.ended, comm.current(), _DONE))
        return self._done or self not in _running

    @property
    def ended(self) -> bool:
        """Whether this rank has written its files, or has failed; asks no other rank."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank could not write; `finish` raises the error on all ranks."""
        return self._error is not None

    def finish(self) -> Any:
        """Waits for the files of all ranks, and makes them the dump in the folder.

        All ranks call it. Training waits for what is not written yet: for nothing if `done` is
        True. Threads may call it: the first one does this, and the others wait for it.

        Returns:
            The name of the dump, as `dump` returns it; a list of names for a list of tables. A
            second call returns the same.

        Raises:
            RuntimeError: as for `dump`, on all ranks. After any exception, also Ctrl-C, each table
                has its earlier dump or this one.
        """

        def settled(wait):
            wait()
            if self._error is not None:
                raise self._error

        with self._ending:
            if self._failed is None and self in _running:
                # Of a second call, unless this one comes to its end.
                interrupted = "This dump in the background was interrupted: begin another"
                self._failed = RuntimeError(interrupted)
                try:
                    for part in self._parts:
                        part.hurry()
                    # First, as nobody must wait for the file of a rank that could not write.
                    for wait in (self._written.wait, self._thread.join):
                        agreement.Steps(CALL).take(settled, [wait])
                    self._result, self._failed = self._publish(), None
                except BaseException as error:
                    self._failed = error if isinstance(error, Exception) else self._failed
                    self._give_up(agreement.raised_on_all(error, comm.current()))
                    raise
            self._forget()  # Ctrl-C may have come before
            if self._failed is not None:
                raise self._failed
        return self._result

    def cancel(self) -> None:
        """Gives the dump up, on all ranks alike; the earlier dump is unchanged."""
        with self._ending:
            if self in _running:
                self._failed = RuntimeError("This dump in the background was cancelled")
                self._give_up(remove=True)

    def _forget(self):
        _running.discard(self)
        for part in self._parts:
            if vars(part.table).get("running_dump") is self:
                del vars(part.table)["running_dump"]

    def _give_up(self, remove):
        self._forget()
        for part in self._parts:
            part._stopped.set()
            part.hurry()
        if self._thread.is_alive():
            self._thread.join()
        for part in self._parts:
            part.close()
            if remove:
                with contextlib.suppress(OSError):
                    part.remove()


def finish_running(table: Any) -> None:
    """Finishes the table's dump in the background, on all ranks; RuntimeError in a graph."""
    dump = vars(table).get("running_dump")
    if dump is None or dump not in _running:
        return
    if not tf.executing_eagerly():
        raise RuntimeError(
            "A dump in the background must be finished, by `finish()`, before a graph dumps or "
            f"restores its table. Received: table '{table.table_name}'"
        )
    dump.finish()


@atexit.register
def _at_exit():
    for dump in list(_running):
        if not dump._ending.acquire(blocking=False):
            continue  # a thread is finishing it
        print(
            f"{dump._text} was not finished: nothing is saved. Call finish() on all ranks.",
            file=sys.stderr,
        )
        dump.cancel()


def _after_fork():
    """In the child, which has neither the thread nor, perhaps, a thread that has the lock."""
    for dump in list(_running):
        dump._ending = threading.RLock()
        dump._failed = RuntimeError(
            f"{dump._text} belongs to the process that began it. "
            f"Received: a call in a child that it has forked, process {os.getpid()}"
        )
        dump._forget()


os.register_at_fork(after_in_child=_after_fork)
