"""Dumps that are written while training goes on.

    begin        all ranks, between two steps: from now on the table logs which keys change
    a thread     base: all keys, in parts, while the table changes | deltas: what has changed while
                 the one before was written | reads back what another rank has written
    finish       all ranks, between two steps: a last delta, while the table stands still | manifest

The base and the thread's deltas are of no instant: a key that changed while one was written has any
row in it, and the next delta holds it. Only with the last delta they are a state of the table, that
of `finish`. The manifest is written then, so a process that is killed before leaves files
without a manifest, which the next dump removes. The threads make no collective calls.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime import agreement, comm
from sok_like.saving import dump_owners, streams
from sok_like.saving.format import checksums, durable, manifest, shard_file
from sok_like.saving.pieces import Piece

_CALL = "a dump in the background"
# Deltas of the thread: each is written faster than the one before, so fewer keys change meanwhile.
_ROUNDS = 4
_BASE, _REST = 0, _ROUNDS + 1  # numbers in the chain
_POLL = 0.05  # seconds between two looks for the file of another rank
# What `agreed` raises on all ranks, once all of them have said how far they have come.
_ON_ALL_RANKS = (RuntimeError, tf.errors.ResourceExhaustedError)
_running: weakref.WeakSet = weakref.WeakSet()


class ChainPiece(Piece):
    """A table whose base and deltas go into a folder, as a piece (`pieces.py`).

    Args:
        table: The EmbeddingVariable.
        folder: The folder.
        dump_id: Part of the names of all files; the same on all ranks.
        reference: The folder's name, if it lies beside a file.
    """

    def __init__(self, table: Any, folder: str, dump_id: str, reference: str | None = None):
        self.table, self.name, self.reference = table, table.table_name, reference
        self.names = [dump_id, *(f"{dump_id}_{number}" for number in range(1, _REST + 1))]
        self.instant = 0  # of the dump that was written last
        self.folder = folder
        self._entries: list[dict[str, Any]] = []
        self._stream: Any = None
        self._handed: list[int] = []
        self._read_back: list[str] = []  # checksums of the files of another rank
        self._stopped = threading.Event()
        # The thread asks nobody: a program may have several communicators.
        self._rank, self._world_size = comm.current().rank, comm.current().world_size
        self._other = dump_owners.read_back()

    # ---- on every rank, in this order; the three in the middle by the thread ----

    def open(self) -> None:
        """The instant after which the table logs its changes. Nothing is read yet."""
        # Ops run here: whether a thread may run them is up to the program.
        self._handed = [int(self.table.hand_over()) for _ in range(_REST)]
        self._stream = streams.Stream(self._handed.pop(), 0, unlocked=True)
        self.instant = self._stream.instant

    def write_base(self) -> None:
        """Writes all keys."""
        self._write_stream(_BASE)

    def write_changes(self) -> None:
        """Writes what has changed since, once for each round; little is left for the end."""
        self._stream = streams.Stream(self._handed.pop(), self.instant, unlocked=True)
        self.instant = self._stream.instant
        self._write_stream(len(self._entries))

    def read_back(self) -> None:
        """Reads what another rank has written, once it is there."""
        for number in range(_REST if self._world_size > 1 else 0):
            path = durable.join(self.folder, self._file(number, self._other))
            while not durable.exists(path):
                self._check_stopped()
                time.sleep(_POLL)
            self._read_back.append(checksums.of_file(path))

    def write(self, folder: str) -> dict[str, Any]:
        """Writes the rest, while the table stands still."""
        if folder != self.folder:
            raise ValueError(f"{_CALL} must end in {self.folder}. Received: {folder}")
        handed = self.table.hand_over()
        with streams.content(handed, self.table.dim, self.instant) as (shard, self.instant):
            self._write(_REST, shard)
        return {"chain": self._entries, "step": int(shard.optimizer_step)}

    def see(self, folder: str, told: Sequence[dict[str, Any]]) -> None:
        """The same for the whole chain; the thread has read back all but the last file."""
        for number in range(_REST):
            entries = [each["chain"][number] for each in told]
            if self._rank == 0:
                manifest.check_seen(folder, entries)
            if self._world_size > 1:
                entry = entries[self._other]
                found = {**entry, "checksum": self._read_back[number]}
                manifest.check_same(folder, found, entry, self._other)
        dump_owners.see_shards(folder, [each["chain"][_REST] for each in told])

    def finish(self, folder: str, told: Sequence[dict[str, Any]]) -> None:
        """Writes the manifest."""
        base, *others = ([each["chain"][number] for each in told] for number in range(_REST + 1))
        # Nobody can continue from the base or the thread's deltas, which are no states.
        steps = [-1] * _ROUNDS + [told[0]["step"]]
        chain = [
            {"dump": name, "since": before, "step": step, "shards": entries}
            for name, before, step, entries in zip(
                self.names[1:], self.names[:-1], steps, others, strict=True
            )
        ]
        key_dtype = self.table.key_dtype.name
        head = manifest.Head(self.name, self.table.dim, key_dtype, self.names[_BASE])
        manifest.write_manifest(folder, head, base, -1, chain)

    # ---- ending early ----

    def stop(self) -> None:
        """Lets the thread end soon."""
        self._stopped.set()

    def close(self) -> None:
        """Frees what the table keeps for it."""
        if self._stream is not None:
            self._stream.close()

    def remove_mine(self) -> None:
        """Removes this rank's files."""
        while self._entries:
            durable.remove(durable.join(self.folder, self._entries.pop()["file"]))

    def _check_stopped(self):
        if self._stopped.is_set():
            raise RuntimeError(f"The dump of table '{self.name}' was given up")

    def _file(self, number, rank):
        return manifest.shard_name(self.name, self.names[number], rank, self._world_size)

    def _write_stream(self, number):
        with contextlib.closing(self._stream):
            shard = self._stream.shard(self.table.dim)
            read = shard.read

            def parts(num_rows):
                for part in read(num_rows):
                    self._check_stopped()
                    yield part

            self._write(number, dataclasses.replace(shard, read=parts))

    def _write(self, number, shard):
        if number == _BASE:
            shard.erased = None  # which makes it a base
        try:
            name = self._file(number, self._rank)
            self._entries.append(shard_file.write_shard(self.folder, name, shard))
        except OSError as error:
            raise durable.explained(error, self.name) from error


class BackgroundDump:
    """A dump that is written while training goes on: what `sok.Saver().begin_dump` returns.

    Args:
        pieces: The tables, in the same order on all ranks.
        publish: Called with `pieces` by `finish`, on all ranks, when nothing is written any more:
            writes the last deltas and the manifests. Its result is that of `finish`.
    """

    def __init__(
        self, pieces: Sequence[ChainPiece], publish: Callable[[Sequence[ChainPiece]], Any]
    ):
        self._pieces, self._publish = list(pieces), publish
        self._written, self._error = threading.Event(), None
        self._result: Any = None
        self._failed: BaseException | None = None
        try:
            _agreed(self._open)
        except BaseException:
            self._close()
            raise
        for piece in pieces:
            piece.table.__dict__["running_dump"] = self
        _running.add(self)
        self._thread = threading.Thread(target=self._run, name="sok_dump", daemon=True)
        self._thread.start()

    def _open(self):
        for piece in self._pieces:
            piece.open()

    def _run(self):
        try:
            for piece in self._pieces:
                piece.write_base()
            for piece in self._pieces * _ROUNDS:
                piece.write_changes()
            self._written.set()
            for piece in self._pieces:
                piece.read_back()
        except BaseException as error:
            self._error = error
        finally:
            self._close()
            self._written.set()

    def _close(self):
        for piece in self._pieces:
            piece.close()

    @property
    def done(self) -> bool:
        """Whether little is left to do for `finish` on this rank; it may also have failed."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank could not write; `finish` raises the error on all ranks."""
        return self._error is not None

    def finish(self) -> Any:
        """Waits for the files, adds what has changed since, and makes it the dump in its folder.

        All ranks call it between the same two steps; the dump is of this instant. Training waits
        for what is not written yet: nearly nothing if `done` is True on all ranks.

        Returns:
            The name of the dump, as `dump` returns it; a list of names for a list of tables. A
            second call returns the same.

        Raises:
            RuntimeError: as for `dump`, on all ranks. The earlier dump is unchanged.
        """
        if self._failed is not None:
            raise self._failed
        if self in _running:
            try:
                _agreed(lambda: self._settled(self._written.wait))
                _agreed(lambda: self._settled(self._thread.join))
                self._result = self._publish(self._pieces)
            except BaseException as error:
                self._failed = error
                self._give_up(comm.current().world_size == 1 or isinstance(error, _ON_ALL_RANKS))
                raise
            finally:
                self._forget()
        return self._result

    def cancel(self) -> None:
        """Gives the dump up, on all ranks alike; the earlier dump is unchanged."""
        if self in _running:
            self._failed = RuntimeError("This dump in the background was cancelled")
            self._give_up(remove=True)
            self._forget()

    def _settled(self, wait):
        wait()
        if self._error is not None:
            raise self._error

    def _forget(self):
        _running.discard(self)
        for piece in self._pieces:
            piece.table.__dict__.pop("running_dump", None)

    def _give_up(self, remove):
        for piece in self._pieces:
            piece.stop()
        self._thread.join()
        for piece in self._pieces if remove else ():
            with contextlib.suppress(OSError):
                piece.remove_mine()

    @staticmethod
    def _at_exit():
        for running in list(_running):
            names = [piece.name for piece in running._pieces]
            print(
                f"The dump in the background of tables {names} was not finished: nothing is saved. "
                "Call finish() on all ranks.",
                file=sys.stderr,
            )
            running._give_up(remove=True)


atexit.register(BackgroundDump._at_exit)


def publish_chains(pieces: Sequence[ChainPiece]) -> None:
    """Writes the last deltas and the manifests of chains that stand alone, all in one folder."""
    folder = pieces[0].folder

    def see():
        for piece, entries in zip(pieces, by_piece, strict=True):
            piece.see(folder, entries)

    def finish():
        for piece, entries in zip(pieces, by_piece, strict=True):
            if comm.current().rank == 0:
                piece.finish(folder, entries)

    told = _agreed(lambda: [piece.write(folder) for piece in pieces])
    by_piece = [list(entries) for entries in zip(*told, strict=True)]
    _agreed(see)
    _agreed(finish)


def _agreed(function):
    """`agreed`, with the exceptions of several ranks on one rank, too."""
    communicator = comm.current()
    try:
        return agreement.agreed(function, communicator, _CALL)
    except Exception as error:
        if communicator.world_size == 1 and not isinstance(error, _ON_ALL_RANKS):
            agreement.raise_first([agreement.problem_of(error)], cause=error)
        raise
