"""What all saves and loads promise, kept in one place for every kind of state and of file.

    save   agree on call, path and parts | every rank writes its parts, flushed | every file is
           seen, with its checksum, by a rank that did not write it | rank 0 puts the common part in
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
    """The steps of a save of parts, which are the same on all ranks.

    With a path the parts get new folders beside the file there; other parts have their folders.
    `common` is called on every rank with the parts' references; on rank 0 it puts the file in its
    place. It may be set after `agree`. An error raises on all ranks, and the previous save is
    intact, unless rank 0 failed while writing the file.
    """

    def __init__(
        self,
        steps: Steps,
        parts: Sequence[CheckpointPart],
        path: str | None = None,
        common: Callable[[Sequence[str]], None] | None = None,
    ):
        self._steps, self.parts, self._path, self.common = steps, list(parts), path, common
        self._references: list[str] = []

    def run(self) -> None:
        """The whole save."""
        self.agree()
        self.write()

    def agree(self) -> None:
        """All ranks agree on what they will write; nothing is written yet."""

        def begin(*_):
            references = []
            if self._path is not None:
                local = durable.local(self._path)
                if local is not None:
                    durable.make_folder(os.path.dirname(local) or ".")
                else:  # object stores have no folders; an unknown scheme raises
                    durable.exists(self._path)
                references = [folders.new_reference(part.name) for part in self.parts]
            begun = [[part.name, part.begin()] for part in self.parts]
            return {"path": self._path, "references": references, "parts": begun}

        def check(ranks):
            check_same(
                [repr(of_rank["path"]) for of_rank in ranks],
                "All ranks must save to the same path, on a file system that they share; if the "
                "path contains a metric, put `sok.callbacks.GlobalMetrics()` or `MetricAverage()` "
                "first in the list of callbacks",
            )
            begun = [of_rank["parts"] for of_rank in ranks]
            names = [[name for name, _ in of_rank] for of_rank in begun]
            check_same(names, f"All ranks must save the same tables ({self._steps.call})")
            for part, of_part in zip(self.parts, zip(*begun, strict=True), strict=True):
                part.agree([message for _, message in of_part])
            self._references = ranks[0]["references"]

        self._steps.take(begin, verify=check)

    def place(self) -> None:
        """Gives parts beside a file their folders, on which the ranks have agreed."""
        if self._path is not None:
            for part, reference in zip(self.parts, self._references, strict=True):
                part.folder = folders.folder_of(self._path, reference)

    def write(self, inputs: Sequence[Any] = ()) -> None:
        """All ranks write, then see what the others have written; then rank 0 publishes it."""
        parts, may_be_named = self.parts, False
        entries: list[Any] = []  # by part: what all ranks have written

        def write(*arguments):  # after what the ranks told each other, if these steps asked it
            self.place()
            numbers = arguments[len(arguments) - len(inputs) :]
            for part, number in zip(parts, numbers, strict=False):
                part.registered = int(number)
            return [part.write() for part in parts]

        def see(ranks):
            entries[:] = zip(*ranks, strict=True)
            for part, of_part in zip(parts, entries, strict=True):
                part.see(of_part)

        def publish(_):
            nonlocal may_be_named
            if self._path is not None:
                # From here on nothing new is removed: the file may name it, though an error comes.
                may_be_named = True
                folders.may_name(self._path, self._references)
            if comm.current().rank == 0:
                for part, of_part in zip(parts, entries, strict=True):
                    part.finish(of_part)
            if self.common is not None:
                self.common(self._references)

        def done(_):
            for part in parts:
                part.done()
            if self._path is not None and comm.current().rank == 0:
                folders.remove_others(self._path, self._references)

        def undo():
            for part in parts if self._path is None else ():
                part.remove()
            if self._path is not None and not may_be_named:
                folders.remove(self._path, self._references)

        self._steps.take(write, inputs, undo=undo)
        self._steps.take(see, undo=undo)
        self._steps.take(publish, verify=done, undo=undo)


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
