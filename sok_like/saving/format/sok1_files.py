"""Dumps of SOK 1.x: the keys and rows of a table on all its GPUs, without optimizer state.

    FOLDER/<variable>_keys.file      keys, int64 or uint32, nothing else
    FOLDER/<variable>_values.file    rows in the same order, float32 `[num_keys, dim]`

Both are little-endian and have no header. The dtype of keys and the row size come from the table
that is restored; files of other sizes are refused. SOK named its variables by itself,
`EmbeddingVariable`, `EmbeddingVariable_1` and so on: such a name does not identify a table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np

from sok_like.saving.format import durable
from sok_like.saving.format.manifest import file_stem
from sok_like.saving.format.shard_reader import ShardInMemory
from sok_like.table.content import TableShard

KEYS, VALUES = "_keys.file", "_values.file"


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

    name, may_grow, dim, deltas = "", False, 0, ()  # SOK stored no width, and had no deltas

    def open(self, number: int, dim: int, progress: Any = None) -> ShardInMemory:
        """Keys and rows; rows stay in the file until they are read."""
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
        path = self.keys_file.removesuffix(KEYS) + VALUES
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
    if path.endswith(KEYS) and durable.exists(path) and not durable.is_folder(path):
        return Sok1Dump(path, table, key_dtype)
    files = [name for name in durable.names(path) if name.endswith(KEYS)]
    if not files:
        return None
    own = f"{stem(table)}{KEYS}"
    if own in files:
        return Sok1Dump(durable.join(path, own), table, key_dtype)
    if len(files) == 1 and re.fullmatch(rf"EmbeddingVariable(_\d+)?{KEYS}", files[0]):
        return Sok1Dump(durable.join(path, files[0]), table, key_dtype)
    raise FileNotFoundError(
        f"The dump of SOK 1.x for table '{table}' must be named: give the path of its key file. "
        f"Received: {filepath} with {files}"
    )


def stem(table: str) -> str:
    """A table's name as it begins the names of its files."""
    # SOK used the name unchanged, but not every table name can be a file name.
    plain = not {"/", "\0"} & set(table) and len(table.encode()) <= 120
    return table if plain else file_stem(table)
