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

import hashlib
import os
import threading
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
        """All ranks write, then see what the others have written; then rank 0 publishes it."""

        def write(*arguments):  # after what the ranks told each other, if these steps asked it
            return self._write(arguments[len(arguments) - len(inputs) :])

        self._steps.take(write, inputs, undo=self._undo)
        self._steps.take(self._see, undo=self._undo)
        self._steps.take(self._publish, verify=self._done, undo=self._undo)

    def _begin(self, *_: Any) -> Any:
        return [[part.name, part.begin()] for part in self._parts]

    def _check(self, ranks):
        names = [[name for name, _ in begun] for begun in ranks]
        check_same(names, f"All ranks must save the same tables ({self._steps.call})")
        for part, begun in zip(self._parts, zip(*ranks, strict=True), strict=True):
            part.agree([message for _, message in begun])

    def _write(self, numbers):
        for part, number in zip(self._parts, numbers, strict=False):
            part.registered = int(number)
        return [part.write() for part in self._parts]

    def _see(self, ranks):
        self._entries = list(zip(*ranks, strict=True))
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
    """A save of parts into new folders beside a file.

    `common` is called on every rank with the parts' references; on rank 0 it puts the file in its
    place. It may be set after `agree`. An error raises on all ranks, and the previous save is
    intact, unless rank 0 failed while writing the file.
    """

    def __init__(
        self,
        call: str,
        path: str,
        parts: Sequence[CheckpointPart],
        common: Callable[[Sequence[str]], None] | None = None,
    ):
        super().__init__(Steps(call, own_error=True), parts)
        self._path, self.common, self._may_be_named = path, common, False
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

    def _check(self, ranks):
        check_same(
            [repr(begun["path"]) for begun in ranks],
            "All ranks must save to the same path, on a file system that they share; if the path "
            "contains a metric, put `sok.callbacks.GlobalMetrics()` or `MetricAverage()` first in "
            "the list of callbacks",
        )
        super()._check([begun["parts"] for begun in ranks])
        self._references = ranks[0]["references"]

    def _write(self, numbers):
        self.place()
        return super()._write(numbers)

    def _publish(self, ranks):
        # From here on nothing new is removed: the file may name it, though an error comes.
        self._may_be_named = True
        folders.may_name(self._path, self._references)
        super()._publish(ranks)
        if self.common is not None:
            self.common(self._references)

    def _done(self, ranks):
        super()._done(ranks)
        if comm.current().rank == 0:
            folders.remove_others(self._path, self._references)

    def _undo(self):
        if not self._may_be_named:
            folders.remove(self._path, self._references)


# ---- loading ----


# .prepared: what the load that a thread is in has prepared so far; .path: of its file.
_now = threading.local()


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
    if hasattr(_now, "prepared"):  # part of another one
        with attributes(_now, {"path": path}):
            return read()
    communicator, compared = comm.current(), compared or path
    prepared: list[StagedContent] = []
    results: list[_T] = []

    def run():
        if not results:
            with attributes(_now, {"prepared": prepared, "path": path}):
                results.append(read())
        return [content.identity for content in prepared]

    def commit(may_fail):
        for content in prepared:
            if content.may_fail == may_fail:
                content.commit()

    try:
        if not collective and not run():
            return results[0]
        _agree_on_file(compared, communicator, call)
        required = "All ranks must read the same dumps beside a file, on a file system that they "
        check_same(agreed(run, communicator, call), f"{required}share, or equal copies")
        # What may fail takes its content while nothing else has.
        agreed(lambda: commit(may_fail=True), communicator, call)
    except BaseException:
        for content in reversed(prepared):
            content.drop()
        raise
    commit(may_fail=False)
    return results[0]


def prepare(prepared: StagedContent) -> None:
    """Hands over what a container has found; outside of `load` it takes its content at once."""
    if not hasattr(_now, "prepared"):
        prepared.commit()
        return
    for earlier in [e for e in _now.prepared if e.target is prepared.target is not None]:
        earlier.drop()
        _now.prepared.remove(earlier)
    _now.prepared.append(prepared)


def folder_read(reference: str) -> str:
    """The folder of a part beside the file that is being read."""
    if vars(_now).get("path") is None:
        raise RuntimeError(
            "A file that several ranks wrote must be read by its path, after `sok.Init`, as its "
            "tables lie beside it. Received: a file object, or a load before `sok.Init`"
        )
    return folders.folder_of(_now.path, reference)


def _agree_on_file(path, communicator, call):
    """Raises on all ranks unless all of them see the same bytes at `path`."""
    # A relative path, or one on a host's own disk, may mean another file on each rank.
    if path is None or communicator.world_size == 1:
        return
    required = "All ranks must read the same file, on a file system that they share"

    def digest_of_file():
        if not durable.exists(path):
            raise FileNotFoundError(f"{required}. Received: {path!r}, which is missing")
        digest = hashlib.sha256()
        for file in durable.files_below(path) if durable.is_folder(path) else [path]:
            digest.update(file.removeprefix(path).encode())
            for data in durable.chunks(file):
                digest.update(data)
        return digest.hexdigest()

    digests = agreed(digest_of_file, communicator, call)
    check_same(
        digests, f"{required}, or equal copies of it: {os.path.abspath(path)!r} on this rank"
    )
