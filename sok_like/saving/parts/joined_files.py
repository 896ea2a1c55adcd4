"""Files that all ranks write together, as SOK 1.x and 2.x do: every rank a part of each file.

    films-key.3f2a.tmp      head | items of rank 0 | items of rank 1 | ...      -> films-key

Several ranks write into one file, if the file system can do that. Otherwise each writes a file of
its own, and rank 0 joins them. When all parts are there, rank 0 gives the files of a table their
names, those of the rows before those of the keys: if both are there, they belong together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable
from sok_like.saving.parts.checkpointable import CheckpointPart

_CHUNK = 2**24  # bytes that are joined at a time


class JoinedFile(NamedTuple):
    """A file, and what this rank writes of it."""

    name: str
    table: str  # whose files get their names together; the keys are the first of them
    head: bytes
    num_items: int  # of this rank
    item_bytes: int
    parts: Iterable[np.ndarray]  # the items, some at a time


class JoinedFiles(CheckpointPart):
    """Such files in a folder, as a part."""

    def __init__(self, name: str, folder: str = ""):
        self.name, self.folder, self._rank = name, folder, comm.current().rank
        self._files: list[JoinedFile] = []
        self._staged: list[str] = []  # a path for each of them, until it has its name
        self._counts: Any = None  # items, by rank and file

    def files(self) -> list[JoinedFile]:
        """The files, the same on all ranks; called when the save begins."""
        raise NotImplementedError

    def begin(self) -> Any:
        self._files = self.files()
        self._is_local = durable.local(self.folder) is not None
        durable.make_folder(self.folder)
        counts = [file.num_items for file in self._files]
        return {"save": f"{secrets.randbits(62):016x}", "counts": counts}

    def agree(self, begun: Sequence[Any]) -> None:
        self._counts = np.array([each["counts"] for each in begun], np.int64)
        ending = f".{begun[0]['save']}.tmp"
        self._staged = [durable.join(self.folder, _stem(file) + ending) for file in self._files]

    def write(self) -> None:
        firsts = self._counts[: self._rank].sum(0).tolist()
        for path, first, file in zip(self._staged, firsts, self._files, strict=True):
            with self._opened(path, file.table) as opened:
                _write(opened, file.head if self._rank == 0 else b"")
                if self._is_local:
                    opened.seek(len(file.head) + first * file.item_bytes)
                for items in file.parts:
                    _write(opened, np.ascontiguousarray(items, items.dtype.newbyteorder("<")))

    @contextlib.contextmanager
    def _opened(self, path, table):
        with durable.explaining(table, path):
            if not self._is_local:
                with durable.written(f"{path}.{self._rank}") as file:
                    yield file
                return
            opened = os.open(durable.local(path) or path, os.O_CREAT | os.O_WRONLY, 0o666)
            # Unbuffered: after an error, closing the file would write the rest of a buffer again.
            with open(opened, "wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())

    def _written(self, path):
        """The files that ranks have written."""
        return [path] if self._is_local else [f"{path}.{n}" for n in range(len(self._counts))]

    def see(self, entries: Sequence[Any]) -> None:
        totals = self._counts.sum(0).tolist() if self._rank == 0 else []
        for path, total, file in zip(self._staged, totals, self._files, strict=False):
            required = len(file.head) + total * file.item_bytes
            size = sum(map(durable.size, self._written(path)))
            if size != required:
                raise ValueError(
                    f"{self.folder} must be a folder that all ranks share. Received: {size} bytes "
                    f"of {required} in {file.name}"
                )

    def finish(self, entries: Sequence[Any]) -> None:
        for path in () if self._is_local else self._staged:
            with durable.written(path) as joined:
                for part in self._written(path):
                    size = durable.size(part)
                    for at in range(0, size, _CHUNK):
                        _write(joined, durable.read(part, at, min(_CHUNK, size - at)))
        staged = zip(self._staged, self._files, strict=True)
        for _, of_table in itertools.groupby(staged, lambda pair: pair[1].table):
            pairs = [(path, durable.join(self.folder, file.name)) for path, file in of_table]
            durable.rename_all(pairs[::-1])
        # What was joined, and what killed processes have left.
        stems = "|".join(re.escape(_stem(file)) for file in self._files)
        ours = re.compile(rf"({stems})\.[0-9a-f]{{16}}\.tmp(\.\d+)?(\.tmp)?")
        for name in filter(ours.fullmatch, durable.names(self.folder)):
            durable.remove(durable.join(self.folder, name))

    def remove(self) -> None:
        for path in self._staged:
            durable.remove(path)
            if not self._is_local:
                durable.remove(f"{path}.{self._rank}")


def _stem(file):
    return file.name.removesuffix(".file")


def _write(file, data: Any):
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while rest:
        rest = rest[file.write(rest) :]
