"""What all saves and loads promise, kept in one place for every kind of state and of file.

    model.keras                          the common part, written by rank 0; it names the folders
    model.keras.tables/user.3f2a9c0b/    a part of several ranks, such as a dump of table 'user'

All ranks make the same call with the same path.

    save   agree on call, path and parts | every rank writes its parts, flushed | every file is
           seen, with its SHA-256, by a rank that did not write it | rank 0 puts the common part in
           its place by one rename: from that instant the save is valid | earlier folders go
    load   agree on the file | every rank prepares all parts: it reads and verifies every byte that
           it will use | all agree | every rank commits, which cannot fail, or drops everything

So a process that is killed at any instant leaves the last finished save intact, and a load changes
everything on all ranks, or nothing on any.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import Steps, agreed, check_same
from sok_like.saving.format import durable, folders
from sok_like.saving.parts.checkpointable import CheckpointPart, StagedContent

_T = TypeVar("_T")


# ---- saving ----


class Saving:
    """The steps of a save of parts that have their folders. Parts are the same on all ranks."""

    def __init__(self, steps: Steps, parts: Sequence[CheckpointPart]):
        self._steps, self._parts = steps, list(parts)
        self._entries: list[Any] = []  # by part: what all ranks have written

    def run(self) -> None:
        """The whole save."""
        self.agree()
        self.write()

    def agree(self) -> None:
        """All ranks agree on what they will write; nothing is written yet."""
        self._steps.take(self._begin, verify=self._check)

    def write(self, inputs: Sequence[Any] = ()) -> None:
        """All ranks write, then see what the others have written; then rank 0 publishes it.

        `inputs` are the numbers that the parts' tables were registered by; without one a part asks.
        """

        def write(*arguments):  # after what the ranks told each other, if these steps asked it
            return self._write(arguments[len(arguments) - len(inputs) :])

        self._steps.take(write, inputs, undo=self._undo)
        self._steps.take(self._see, undo=self._undo)
        self._steps.take(self._publish, verify=self._done, undo=self._undo)

    def _begin(self, *_: Any) -> Any:
        return [[part.name, part.begin()] for part in self._parts]

    def _check(self, told):
        names = [[name for name, _ in begun] for begun in told]
        check_same(names, f"All ranks must save the same tables ({self._steps.call})")
        for part, begun in zip(self._parts, zip(*told, strict=True), strict=True):
            part.agree([message for _, message in begun])

    def _write(self, numbers):
        for part, number in zip(self._parts, numbers, strict=False):
            part.registered = int(number)
        return [part.write() for part in self._parts]

    def _see(self, told):
        self._entries = list(zip(*told, strict=True))
        for part, entries in zip(self._parts, self._entries, strict=True):
            part.see(entries)

    def _publish(self, _):
        if comm.current().rank == 0:
            for part, entries in zip(self._parts, self._entries, strict=True):
                part.finish(entries)

    def _done(self, _):
        for part in self._parts:
            part.done()

    def _undo(self):
        for part in self._parts:
            part.remove()


class SavingBeside(Saving):
    """A save of parts into new folders beside a file."""

    # Called on every rank with the parts' references; on rank 0 it puts the file in its place.
    common: Callable[[Sequence[str]], None]

    def __init__(self, call: str, path: str, parts: Sequence[CheckpointPart]):
        super().__init__(Steps(call), parts)
        self._path, self._may_be_named = path, False
        self._references: list[str] = []

    def place(self) -> None:
        """Gives the parts their folders, on which the ranks have agreed."""
        for part, reference in zip(self._parts, self._references, strict=True):
            part.folder = folders.folder_of(self._path, reference)

    def _begin(self, *_):
        local = durable.local(self._path)
        if local is not None:
            durable.make_folder(os.path.dirname(local) or ".")
        else:  # object stores have no folders; an unknown scheme raises
            durable.exists(self._path)
        references = [folders.new_reference(part.name) for part in self._parts]
        return {"path": self._path, "references": references, "parts": super()._begin()}

    def _check(self, told):
        check_same(
            [repr(each["path"]) for each in told],
            "All ranks must save to the same path, on a file system that they share; if the path "
            "contains a metric, put `sok.callbacks.GlobalMetrics()` or `MetricAverage()` first in "
            "the list of callbacks",
        )
        super()._check([each["parts"] for each in told])
        self._references = told[0]["references"]

    def _write(self, numbers):
        self.place()
        return super()._write(numbers)

    def _publish(self, told):
        # From here on nothing new is removed: the file may name it, though an error comes.
        self._may_be_named = True
        folders.may_name(self._path, self._references)
        super()._publish(told)
        self.common(self._references)

    def _done(self, told):
        super()._done(told)
        if comm.current().rank == 0:
            folders.remove_others(self._path, self._references)

    def _undo(self):
        if not self._may_be_named:
            folders.remove(self._path, self._references)


def save(
    call: str,
    path: str,
    parts: Sequence[CheckpointPart],
    common: Callable[[Sequence[str]], None],
) -> None:
    """Writes parts beside the file at `path`, then the file; all ranks call it with the same.

    An error raises on all ranks, and the previous save is intact, unless rank 0 failed while
    writing the file.
    """
    saving = SavingBeside(call, path, parts)
    saving.common = common
    saving.run()


# ---- loading ----


class _Load(threading.local):
    """The load that a thread is in: what is prepared so far, and the file's path; or none."""

    prepared: list[StagedContent] | None = None
    path: str | None = None


_load = _Load()


def load(
    call: str,
    path: str | None,
    read: Callable[[], _T],
    *,
    compared: str | None = None,
    collective: bool = True,
) -> _T:
    """Reads a file and its parts; all ranks call it. Returns the result of `read`.

    `read` finds parts in the file, and hands each to `prepare`; it is no collective. If a rank sees
    another file (`compared`, by default the one at `path`) or fails, all ranks raise RuntimeError,
    and nothing has changed. A single rank raises the error itself. Without a path all parts must be
    inside the file. `collective` is False if it is not known yet whether it has parts.
    """
    if _load.prepared is not None:  # part of another one
        with attributes(_load, {"path": path}):
            return read()
    communicator, compared = comm.current(), compared or path
    prepared: list[StagedContent] = []
    results: list[_T] = []

    def run():
        if not results:
            with attributes(_load, {"prepared": prepared, "path": path}):
                results.append(read())
        return [each.identity for each in prepared]

    try:
        if not collective and not run():
            return results[0]
        agree_on_file(compared, communicator, call)
        identities = agreed(run, communicator, call)
        for rank in range(len(identities)):
            if identities[rank] != identities[0]:
                raise RuntimeError(
                    "All ranks must read the same dumps beside a file, on a file system that they "
                    f"share, or equal copies. Received: others on rank {rank} than on rank 0"
                )
        # What may fail takes its content while nothing else has.
        agreed(lambda: _commit(prepared, may_fail=True), communicator, call)
    except BaseException:
        for each in reversed(prepared):
            each.drop()
        raise
    _commit(prepared, may_fail=False)
    return results[0]


def _commit(prepared, may_fail):
    for each in prepared:
        if each.may_fail == may_fail:
            each.commit()


def prepare(prepared: StagedContent) -> None:
    """Hands over what a container has found; outside of `load` it takes its content at once."""
    if _load.prepared is None:
        prepared.commit()
        return
    for each in [e for e in _load.prepared if e.target is prepared.target is not None]:
        each.drop()
        _load.prepared.remove(each)
    _load.prepared.append(prepared)


def folder_read(reference: str) -> str:
    """The folder of a part beside the file that is being read."""
    if _load.path is None:
        raise RuntimeError(
            "A file that several ranks wrote must be read by its path, after `sok.Init`, as its "
            "tables lie beside it. Received: a file object, or a load before `sok.Init`"
        )
    return folders.folder_of(_load.path, reference)


def agree_on_file(path: str | None, communicator: Any, call: str) -> None:
    """Raises on all ranks unless all of them see the same bytes at `path`.

    A relative path, or one on a host's own disk, may mean another file on each rank. Ranks that
    read different files would differ silently from then on.
    """
    if path is None or communicator.world_size == 1:
        return

    def look():
        if not durable.exists(path):
            raise FileNotFoundError(
                "All ranks must read the same file, on a file system that they share. "
                f"Received: {path!r}, which is missing"
            )
        return _digest(path)

    told = agreed(look, communicator, call)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise RuntimeError(
                "All ranks must read the same file, on a file system that they share, or equal "
                f"copies. Received: {os.path.abspath(path)!r} on this rank, and another file on "
                f"rank {rank} than on rank 0"
            )


def _digest(path):
    """The SHA-256 of a file, or of all files of a folder."""
    digest = hashlib.sha256()
    for file in durable.files_below(path) if durable.is_folder(path) else [path]:
        digest.update(file.removeprefix(path).encode())
        with durable.open_to_read(file) as opened:
            while data := opened.read(2**22):
                digest.update(data)
    return digest.hexdigest()


# ---- which references a Keras file that is being written gets ----

_now = threading.local()


def writing(
    objects: Sequence[Any], references: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """A scope in which tables that Keras writes write their reference."""
    pairs = zip(objects, references, strict=True)
    return attributes(_now, {"written": [(weakref.ref(each), name) for each, name in pairs]})


def is_writing() -> bool:
    """Whether such a scope is active."""
    return hasattr(_now, "written")


def reference_of(thing: Any) -> str | None:
    """The folder that the file being written names for an object; None: it goes inside."""
    found = getattr(_now, "written", ())
    return next((reference for each, reference in found if each() is thing), None)
