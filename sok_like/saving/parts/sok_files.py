"""Files as SOK wrote them: those of SOK 1.x, and how all ranks write one file together.

SOK 1.x's Saver wrote the keys and rows of a table on all its GPUs, without optimizer state:

    FOLDER/<variable>_keys.file      keys, int64 or uint32, nothing else
    FOLDER/<variable>_values.file    rows in the same order, float32 `[num_keys, dim]`

Both are little-endian and have no header. The dtype of keys and the row size come from the table
that is restored; files of other sizes are refused. SOK named its variables by itself,
`EmbeddingVariable`, `EmbeddingVariable_1` and so on: such a name does not identify a table.

Of these files and those of SOK 2.x every rank writes a part, into one file if the file system can
do that, else into a file of its own, and rank 0 joins them:

    films-key.3f2a.tmp      head | items of rank 0 | items of rank 1 | ...      -> films-key
"""

import contextlib
import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable
from sok_like.saving.format.manifest import Dump, file_stem
from sok_like.saving.format.shard_file import ShardSource
from sok_like.saving.parts.checkpointable import CheckpointPart
from sok_like.table.content import TableShard

KEYS, VALUES = "_keys.file", "_values.file"


class Sok1Dump(Dump):
    """A pair of files, as a dump of one shard; that of the keys stands for both."""

    def __init__(self, keys_file: str, table: str, key_dtype: np.dtype):
        self._values_file = keys_file.removesuffix(KEYS) + VALUES
        if not durable.exists(self._values_file):
            raise FileNotFoundError(f"{keys_file} needs {self._values_file}, which is missing")
        self._table, self._key_dtype = table, key_dtype
        self._sizes = [durable.size(path) for path in (keys_file, self._values_file)]
        content = repr((os.path.basename(keys_file), self._sizes))
        super().__init__([keys_file], [], hashlib.sha256(content.encode()).hexdigest(), "")

    def open(self, number: int, dim: int, progress: Any = None) -> ShardSource:
        """Keys and rows; rows stay in the file until they are read."""
        (keys_file,), key_bytes = self.files, self._key_dtype.itemsize
        num_keys, rest = divmod(self._sizes[0], key_bytes)
        if rest or self._sizes[1] != 4 * dim * num_keys:
            raise ValueError(
                f"Table '{self._table}' has keys of {self._key_dtype.name} and rows of {dim} "
                f"floats, so {keys_file} and {self._values_file} must hold {key_bytes} and "
                f"{4 * dim} bytes for each key. Received: {self._sizes[0]} and {self._sizes[1]} "
                "bytes"
            )
        keys = np.frombuffer(durable.read(keys_file), self._key_dtype.newbyteorder("<"))
        if len(np.unique(keys)) != num_keys:
            raise ValueError(f"{keys_file} must hold each key once")
        return _Shard(keys.astype(np.int64), self._values_file, dim)


class _Shard(ShardSource):
    """Keys in memory, and their rows in a file."""

    def __init__(self, keys: np.ndarray, values_file: str, dim: int):
        self.name, self._keys, self._dim = values_file, keys, dim
        self.num_keys, self.key_bytes = len(keys), 8 + 4 * dim
        self.slot_names, self.slot_widths = [], []

    def keys(self, begin, end):
        return self._keys[begin:end]

    def part(self, begin, end):
        keys = self.keys(begin, end)
        rows: np.ndarray = np.empty([len(keys), self._dim], "<f4")
        durable.read_into(self.name, 4 * self._dim * begin, rows)
        return TableShard(keys, rows, rows[:, :0], [], [])


def find_dump(filepath: str, table: str, key_dtype: Any) -> Sok1Dump | None:
    """The dump of a table in a folder or a file of keys; None if there are no files of SOK 1.x."""
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


class JoinedFile(NamedTuple):
    """A file, and what this rank writes of it."""

    name: str
    table: str  # whose files get their names together; the keys are the first of them
    head: bytes
    num_items: int  # of this rank
    item_bytes: int
    parts: Iterable[np.ndarray]  # the items, some at a time


class JoinedFiles(CheckpointPart):
    """Such files in a folder, as a part. When the save begins, `find` returns the two.

    `find_outdated` names files of earlier saves in the folder. They go, replaced or not.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], tuple[str, list[JoinedFile]]],
        find_outdated: Callable[[str], Iterable[str]] = lambda folder: (),
    ):
        self.name, self._find, self._rank = name, find, comm.current().rank
        self._find_outdated = find_outdated
        self._files: list[JoinedFile] = []  # the same on all ranks
        self._staged: list[str] = []  # a path for each of them, until it has its name
        self._counts: Any = None  # items, by rank and file

    def begin(self) -> Any:
        self.folder, self._files = self._find()
        self._is_local = durable.local(self.folder) is not None
        durable.make_folder(self.folder)
        counts = [file.num_items for file in self._files]
        return {"save": f"{secrets.randbits(62):016x}", "counts": counts}

    def agree(self, begun: Sequence[Any]) -> None:
        self._counts = np.array([each["counts"] for each in begun], np.int64)
        ending = f".{begun[0]['save']}.tmp"
        names = [file.name.removesuffix(".file") for file in self._files]
        self._staged = [durable.join(self.folder, name + ending) for name in names]

    def write(self) -> None:
        firsts = self._counts[: self._rank].sum(0).tolist()
        for path, first, file in zip(self._staged, firsts, self._files, strict=True):
            with self._opened(path, file.table) as opened:
                durable.write_all(opened, file.head if self._rank == 0 else b"")
                if self._is_local:
                    opened.seek(len(file.head) + first * file.item_bytes)
                for items in file.parts:
                    durable.write_all(
                        opened, np.ascontiguousarray(items, items.dtype.newbyteorder("<"))
                    )

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
                received = f"{size} bytes of {required} in {file.name}"
                raise durable.wrong(self.folder, "be a folder that all ranks share", received)

    def finish(self, entries: Sequence[Any]) -> None:
        for path in () if self._is_local else self._staged:
            with durable.written(path) as joined:
                for part in self._written(path):
                    for data in durable.chunks(part):
                        durable.write_all(joined, data)
        # First: beside new keys they would count as theirs.
        for name in {*self._find_outdated(self.folder)} - {file.name for file in self._files}:
            durable.remove(durable.join(self.folder, name))
        staged = zip(self._staged, self._files, strict=True)
        for _, of_table in itertools.groupby(staged, lambda pair: pair[1].table):
            pairs = [(path, durable.join(self.folder, file.name)) for path, file in of_table]
            durable.rename_all(pairs[::-1])
        # What was joined, and what killed processes have left.
        stems = "|".join(re.escape(file.name.removesuffix(".file")) for file in self._files)
        ours = re.compile(rf"({stems})\.[0-9a-f]{{16}}\.tmp(\.\d+)?(\.tmp)?")
        for name in filter(ours.fullmatch, durable.names(self.folder)):
            durable.remove(durable.join(self.folder, name))

    def remove(self) -> None:
        for path in self._staged:
            durable.remove(path)
            if not self._is_local:
                durable.remove(f"{path}.{self._rank}")
