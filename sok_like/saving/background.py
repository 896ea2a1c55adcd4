"""Dumps that are written while training goes on.

    begin_dump   all ranks, between two steps: the instant of the dump. Nothing is written yet
    a thread     writes this rank's file | reads back the file that another rank has written
    finish       all ranks: the manifest

A row that changes while the thread writes is copied first (`cpp/core/cpu/instant.h`), so the file
has the rows of the instant. The manifest is written last, so a process that is killed before leaves
files without a manifest, which the next dump removes. The threads make no collective calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sok_like.runtime.ranks import agreement, comm
from sok_like.saving.format import checksums, durable, manifest, shard_file
from sok_like.saving.parts import dump_checks
from sok_like.saving.parts.checkpointable import CheckpointPart
from sok_like.saving.transaction import ON_ALL_RANKS
from sok_like.table import table_reader

_CALL, _DONE = "a dump in the background", "`done` of a dump in the background"
_POLL = 0.05  # seconds between two looks for the file of another rank


class BackgroundPart(CheckpointPart):
    """A table of which a thread writes a dump into a folder, as a part (`checkpointable.py`).

    Args:
        table: The EmbeddingVariable.
        folder: The folder.
        dump_id: Part of the names of all files; the same on all ranks.
        reference: The folder's name, if it lies beside a file.
    """

    def __init__(self, table: Any, folder: str, dump_id: str, reference: str | None = None):
        self.table, self.name, self.reference = table, table.table_name, reference
        self.folder, self.id = folder, dump_id
        self.instant = 0  # of the dump
        self._entry: dict[str, Any] = {}
        self._step, self._read_back = -1, ""  # the checksum of the file of another rank
        self._stream: Any = None
        self._stopped = threading.Event()
        # The thread asks nobody: a program may have several communicators.
        self._rank, self._world_size = comm.current().rank, comm.current().world_size
        self._other = dump_checks.read_back()

    # ---- on every rank, in this order; the two in the middle by the thread ----

    def open(self) -> None:
        """The instant of the dump. Nothing is read yet."""
        self._stream = table_reader.TableReader(int(self.table.register_for_read()), 0, beside=True)
        self.instant = self._stream.instant

    def write_file(self) -> None:
        """Writes all keys."""
        with contextlib.closing(self._stream):
            self._check_stopped()
            shard = self._stream.shard(self.table.dim)
            self._step, shard.erased, read = int(shard.optimizer_step), None, shard.read

            def parts(num_rows):
                for part in read(num_rows):
                    self._check_stopped()
                    yield part

            shard.read = parts
            try:
                self._entry = shard_file.write_shard(self.folder, self._file(self._rank), shard)
            except OSError as error:
                raise durable.explained(error, self.name) from error

    def read_back(self) -> None:
        """Reads what another rank has written, once it is there."""
        if self._world_size == 1:
            return
        path = durable.join(self.folder, self._file(self._other))
        while not durable.exists(path):
            self._check_stopped()
            time.sleep(_POLL)
        self._read_back = checksums.of_file(path)

    def write(self, folder: str) -> dict[str, Any]:
        """What the thread has written."""
        if folder != self.folder:
            raise ValueError(f"{_CALL} must end in {self.folder}. Received: {folder}")
        return {"entry": self._entry, "step": self._step}

    def see(self, folder: str, told: Sequence[dict[str, Any]]) -> None:
        """The same, with what the thread has read back."""
        entries = [each["entry"] for each in told]
        if self._world_size > 1:
            entry = entries[self._other]
            manifest.check_same(folder, {**entry, "checksum": self._read_back}, entry, self._other)

    def finish(self, folder: str, told: Sequence[dict[str, Any]]) -> None:
        """Writes the manifest."""
        key_dtype = self.table.key_dtype.name
        head = manifest.Head(self.name, self.table.dim, key_dtype, self.id)
        manifest.write_manifest(folder, head, [each["entry"] for each in told], told[0]["step"], [])

    def hurry(self) -> None:
        """Somebody waits for the dump: the thread does not rest any more."""
        if self._stream is not None:
            self._stream.hurry()

    # ---- ending early ----

    def stop(self) -> None:
        """Lets the thread end soon."""
        self._stopped.set()
        self.hurry()

    def close(self) -> None:
        """Frees what the table keeps for it."""
        if self._stream is not None:
            self._stream.close()

    def remove_mine(self) -> None:
        """Removes this rank's file, unless it is part of a dump that is complete."""
        manifest.remove_unlisted(self.folder, self.name, self._file(self._rank))

    def _check_stopped(self):
        if self._stopped.is_set():
            raise RuntimeError(f"The dump of table '{self.name}' was given up")

    def _file(self, rank):
        return manifest.shard_name(self.name, self.id, rank, self._world_size)


class BackgroundDump:
    """A dump that is written while training goes on: what `sok.Saver().begin_dump` returns.

    Args:
        parts: The tables, in the same order on all ranks.
        publish: Called with `parts` by `finish`, on all ranks, when all files are written: makes
            them the dump. Its result is that of `finish`.
    """

    def __init__(
        self, parts: Sequence[BackgroundPart], publish: Callable[[Sequence[BackgroundPart]], Any]
    ):
        self._parts, self._publish = list(parts), publish
        self._written, self._result = threading.Event(), None
        self._error: BaseException | None = None
        self._failed: Exception | None = None
        self._ending, self._done = threading.RLock(), False
        self._text = f"The dump in the background of tables {[part.name for part in parts]}"
        self._thread = threading.Thread(target=self._run, name="sok_dump", daemon=True)
        try:
            _agreed(self._open)
            for part in parts:
                part.table.__dict__["running_dump"] = self
            dump_checks.running.add(self)
            self._thread.start()
        except BaseException:
            self._forget()
            for part in parts:
                part.stop()
            if not self._thread.is_alive():  # else it closes them itself
                self._close()
            raise

    def _open(self):
        for part in self._parts:
            part.open()

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
            self._close()
            self._written.set()

    def _close(self):
        for part in self._parts:
            part.close()

    @property
    def done(self) -> bool:
        """Whether all ranks have written their files; one may also have failed.

        All ranks ask, at the same step, as it is an exchange. So all leave a loop together.
        """
        if not self._done and self in dump_checks.running:
            self._done = all(agreement.agreed(lambda: self.ended, comm.current(), _DONE))
        return self._done or self not in dump_checks.running

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
        with self._ending:
            if self._failed is None and self in dump_checks.running:
                self._end()
            self._forget()  # Ctrl-C may have come before
            if self._failed is not None:
                raise self._failed
        return self._result

    def _end(self):
        # Of a second call, unless this one comes to its end.
        self._failed = RuntimeError("This dump in the background was interrupted: begin another")
        try:
            for part in self._parts:
                part.hurry()
            # First, as nobody must wait for the file of a rank that could not write.
            _agreed(lambda: self._settled(self._written.wait))
            _agreed(lambda: self._settled(self._thread.join))
            self._result = self._publish(self._parts)
            self._failed = None
        except BaseException as error:
            self._failed = error if isinstance(error, Exception) else self._failed
            self._give_up(comm.current().world_size == 1 or isinstance(error, ON_ALL_RANKS))
            raise

    def cancel(self) -> None:
        """Gives the dump up, on all ranks alike; the earlier dump is unchanged."""
        with self._ending:
            if self in dump_checks.running:
                self._failed = RuntimeError("This dump in the background was cancelled")
                self._give_up(remove=True)

    def _settled(self, wait):
        wait()
        if self._error is not None:
            raise self._error

    def _forget(self):
        dump_checks.running.discard(self)
        for part in self._parts:
            if part.table.__dict__.get("running_dump") is self:
                del part.table.__dict__["running_dump"]

    def _give_up(self, remove):
        self._forget()
        for part in self._parts:
            part.stop()
        self._thread.join()
        for part in self._parts if remove else ():
            with contextlib.suppress(OSError):
                part.remove_mine()

    @staticmethod
    def _at_exit():
        for dump in list(dump_checks.running):
            if not dump._ending.acquire(blocking=False):
                continue  # a thread is finishing it
            print(
                f"{dump._text} was not finished: nothing is saved. Call finish() on all ranks.",
                file=sys.stderr,
            )
            dump.cancel()

    @staticmethod
    def _after_fork():
        """In the child, which has neither the thread nor, perhaps, a thread that has the lock."""
        for dump in list(dump_checks.running):
            dump._ending = threading.RLock()
            dump._failed = RuntimeError(
                f"{dump._text} belongs to the process that began it. "
                f"Received: a call in a child that it has forked, process {os.getpid()}"
            )
            dump._forget()


atexit.register(BackgroundDump._at_exit)
os.register_at_fork(after_in_child=BackgroundDump._after_fork)


def publish(parts: Sequence[BackgroundPart]) -> None:
    """Writes the manifests of dumps that stand alone, all in one folder."""
    folder = parts[0].folder

    def see():
        for part, entries in listed:
            part.see(folder, entries)

    def finish():
        for part, entries in listed if comm.current().rank == 0 else ():
            part.finish(folder, entries)

    told = _agreed(lambda: [part.write(folder) for part in parts])
    listed = list(zip(parts, zip(*told, strict=True), strict=True))
    _agreed(see)
    _agreed(finish)


def _agreed(function):
    """`agreed`, with the exceptions of several ranks on one rank, too."""
    communicator = comm.current()
    try:
        return agreement.agreed(function, communicator, _CALL)
    except Exception as error:
        if communicator.world_size == 1 and not isinstance(error, ON_ALL_RANKS):
            agreement.raise_first([agreement.problem_of(error)], cause=error)
        raise
