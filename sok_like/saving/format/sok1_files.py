"""Dumps of SOK 1.x: the keys and rows of a table on all its GPUs, without optimizer state.

    FOLDER/<variable>_keys.file      keys, int64 or uint32, nothing else
    FOLDER/<variable>_values.file    rows in the same order, float32 `[num_keys, dim]`

Both are little-endian and have no header. The dtype of keys and the row size come from the table
that is restored; files of other sizes are refused. SOK named its variables by itself,
`EmbeddingVariable`, `EmbeddingVariable_1` and so on: such a name does not identify a table.

`write` makes such files of a table, for programs that read what SOK's Saver wrote. Each rank writes
its part of both under another name. Rank 0 then removes the old keys, and renames first the rows,
then the keys. So if both files are there, they belong together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.graph_collectives import Steps
from sok_like.saving.format import durable
from sok_like.saving.format.manifest import file_stem
from sok_like.saving.format.part_file import write_part
from sok_like.saving.format.shard_reader import ShardFile, ShardInMemory
from sok_like.table.content import TableShard

_KEYS, _VALUES = "_keys.file", "_values.file"


@dataclasses.dataclass
class Sok1Dump:
    """A pair of files, with the interface of a dump of one shard."""

    keys_file: str
    table: str
    key_dtype: np.dtype

    @property
    def files(self) -> list[str]:
        """The one file that stands for both."""
        return [self.keys_file]

    @property
    def identity(self) -> str:
        """The same on ranks that see the same files."""
        sizes = [durable.size(path) for path in (self.keys_file, self._values_file())]
        name = os.path.basename(self.keys_file)
        return hashlib.sha256(repr((name, sizes)).encode()).hexdigest()

    @property
    def deltas(self) -> list[Any]:
        """Empty: SOK had no deltas."""
        return []

    name, may_grow = "", False

    def open(self, number: int, dim: int, progress: Any = None) -> ShardInMemory:
        """Keys and rows; rows stay in the file until they are read.

        Raises:
            FileNotFoundError: the file of the rows is missing.
        """
        values_file = self._values_file()
        sizes = [durable.size(path) for path in (self.keys_file, values_file)]
        num_keys, rest = divmod(sizes[0], self.key_dtype.itemsize)
        if rest or sizes[1] != 4 * dim * num_keys:
            raise ValueError(
                f"Table '{self.table}' has keys of {self.key_dtype.name} and rows of {dim} floats, "
                f"so {self.keys_file} and {values_file} must hold {self.key_dtype.itemsize} and "
                f"{4 * dim} bytes for each key. Received: {sizes[0]} and {sizes[1]} bytes"
            )
        dtype = self.key_dtype.newbyteorder("<")
        keys = np.frombuffer(durable.read(self.keys_file), dtype).astype(np.int64)
        if len(np.unique(keys)) != num_keys:
            raise ValueError(f"{self.keys_file} must hold each key once")
        no_slots: np.ndarray = np.zeros([num_keys, 0], np.float32)
        rows = _RowFile(values_file, (num_keys, dim))
        return ShardInMemory(TableShard(keys, rows, no_slots, [], []))

    def _values_file(self):
        path = self.keys_file.removesuffix(_KEYS) + _VALUES
        if not durable.exists(path):
            raise FileNotFoundError(f"The keys {self.keys_file} need {path}, which is missing")
        return path


class _RowFile:
    """Rows in a file; a slice of them is read."""

    def __init__(self, path: str, shape: tuple[int, int]):
        self._path, self.shape = path, shape

    def __getitem__(self, positions: slice) -> np.ndarray:
        begin, end, _ = positions.indices(self.shape[0])
        rows: np.ndarray = np.empty([max(0, end - begin), self.shape[1]], "<f4")
        durable.read_into(self._path, 4 * self.shape[1] * begin, rows)
        return rows


def find(filepath: str, table: str, key_dtype: Any) -> Sok1Dump | None:
    """The dump of a table; None if there are no files of SOK 1.x.

    `filepath` is a file of keys or a folder: then the file with the table's name is used, or the
    only file if SOK chose its name.
    """
    path, key_dtype = os.fspath(filepath), np.dtype(key_dtype)
    if path.endswith(_KEYS) and durable.exists(path) and not durable.is_folder(path):
        return Sok1Dump(path, table, key_dtype)
    files = [name for name in durable.names(path) if name.endswith(_KEYS)]
    if not files:
        return None
    own = f"{_stem(table)}{_KEYS}"
    if own in files:
        return Sok1Dump(durable.join(path, own), table, key_dtype)
    if len(files) == 1 and re.fullmatch(rf"EmbeddingVariable(_\d+)?{_KEYS}", files[0]):
        return Sok1Dump(durable.join(path, files[0]), table, key_dtype)
    raise FileNotFoundError(
        f"The dump of SOK 1.x for table '{table}' must be named: give the path of its key file. "
        f"Received: {filepath} with {files}"
    )


def _stem(table):
    # SOK used the name unchanged, but not every table name can be a file name.
    plain = not {"/", "\0"} & set(table) and len(table.encode()) <= 120
    return table if plain else file_stem(table)


def write(steps: Steps, variable: Any, filepath: Any, shard: Sequence[Any]) -> None:
    """Writes both files, in steps that all ranks take; in a graph, when it runs.

    Args:
        shard: Path of this rank's shard of the dump and its number of keys; filled once the shard
            is written.

    Raises:
        RuntimeError: as in `Steps.take`; then both files are the earlier ones, or the new ones.
    """
    rank, table, dim = comm.current().rank, variable.table_name, variable.dim
    key_dtype = np.dtype(variable.key_dtype.as_numpy_dtype)
    aside: list[str] = []

    def target(kind):
        return durable.join(filepath, f"{_stem(table)}{kind}")

    def count(_):
        return {"file": shard[0], "keys": shard[1], "dump": f"{secrets.randbits(62):016x}"}

    def write_mine(told):
        aside.clear()
        for kind, array, dtype in ((_KEYS, "keys", key_dtype), (_VALUES, "rows", np.float32)):
            aside.append(f"{_aside(target(kind))}.{told[0]['dump']}.tmp")
            if durable.local(aside[-1]) is not None:
                begin = sum(message["keys"] for message in told[:rank])
                for part in ShardFile(shard[0], dim).parts(array):
                    part = part.astype(dtype)
                    write_part(aside[-1], part, begin * part[:1].nbytes, table)
                    begin += len(part)
            elif rank == 0:  # elsewhere a file cannot be written by several ranks
                with durable.written(aside[-1]) as file:
                    for message in told:
                        for part in ShardFile(message["file"], dim).parts(array):
                            file.write(part.astype(dtype).tobytes())

    def remove_mine():
        for path in aside:
            durable.remove(path)

    def publish(_):
        if rank == 0:
            targets = [target(kind) for kind in (_KEYS, _VALUES)]
            durable.rename_all(list(zip(aside, targets, strict=True))[::-1])
            for kind in (_KEYS, _VALUES):  # left by killed processes
                stem = re.escape(os.path.basename(_aside(target(kind))))
                for name in durable.names(filepath):
                    if re.fullmatch(stem + r"\.[0-9a-f]{16}\.tmp(\.tmp)?", name):
                        durable.remove(durable.join(filepath, name))

    steps.take(count)
    steps.take(write_mine, undo=remove_mine)
    steps.take(publish, undo=remove_mine)


def _aside(target):
    return target.removesuffix(".file")
