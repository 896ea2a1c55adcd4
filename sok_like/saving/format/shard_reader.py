"""Reads one rank's file of a dump in parts, without trusting it.

Sizes are checked before memory is allocated for them. The manifest's checksum covers every byte
(`checksums.py`). Dumps of version 1 have none; there CRC-32 covers each array and its header.

A right checksum proves that the file is as it was written, not that it was written rightly. So what
no table can have is refused, too: a key twice, a key of another rank, negative counts and steps.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import zipfile
import zlib
from typing import Any

import numpy as np

from sok_like.saving.format import checksums, durable
from sok_like.saving.format.progress import Progress
from sok_like.saving.format.shard_file import CHUNK_BYTES
from sok_like.table.content import BY_KEY, OF_POLICIES, REQUIRED, TableShard
from sok_like.table.keys import owners

# dtypes as `.npy` headers name them, and the number of axes.
_MEMBERS = {
    "keys": ("<i8", 1),
    "rows": ("<f4", 2),
    "slot_rows": ("<f4", 2),
    "slot_names": ("<U", 1),
    "slot_widths": ("<i8", 1),
    "optimizer_step": ("<i8", 0),
    "initial_row_scale": ("<f8", 0),
    "records": ("<i8", 2),
    "waiting": ("<i8", 2),
    "counters": ("<i8", 1),
    "step": ("<i8", 0),
    "erased": ("<i8", 1),
    "whole": ("<i8", 0),
    "steps": ("<f8", 2),
    "optimizer": ("<U", 0),
}
_OF_DELTAS = {"erased", "whole", "steps", "optimizer"}
_HEADER = re.compile(
    rb"\{'descr': '([<|][A-Za-z]\d{1,6})', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,19}(?:, ?\d{1,19})*,?)?)\), \} *\n"
)


@dataclasses.dataclass
class _Stored:
    """Where the elements of an array lie in the file."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def row_bytes(self):
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class ShardSource:
    """Reads a shard's keys and their data part by part."""

    name: str  # its name in errors
    num_keys: int
    slot_names: list[str]
    slot_widths: list[int]  # their widths in a slot row
    key_bytes: int  # bytes that belong to one key

    def keys(self, begin: int, end: int) -> np.ndarray:
        """The keys at positions `begin` to `end`."""
        raise NotImplementedError

    def part(self, begin: int, end: int) -> TableShard:
        """The keys at these positions with their data."""
        raise NotImplementedError

    def without_keys(self) -> TableShard:
        """What belongs to no key."""
        raise NotImplementedError


class ShardInMemory(ShardSource):
    """A shard in memory."""

    def __init__(self, shard: TableShard):
        self.name, self._shard, self.num_keys = "a shard", shard, len(shard.keys)
        self.slot_names, self.slot_widths = shard.slot_names, shard.slot_widths
        self.key_bytes = sum(array[:1].nbytes for array in shard.by_key().values())

    def keys(self, begin, end):
        return np.asarray(self._shard.keys[begin:end])

    def part(self, begin, end):
        found = {name: np.array(a[begin:end]) for name, a in self._shard.by_key().items()}
        return TableShard(slot_names=self.slot_names, slot_widths=self.slot_widths, **found)

    def without_keys(self):
        nothing = {name: a[:0] for name, a in self._shard.by_key().items()}
        return dataclasses.replace(self._shard, **nothing)


class ShardFile(ShardSource):
    """A shard file whose checksums are right; arrays are read on demand.

    Version 1 had no `entry` in the manifest. `owner` is the rank that wrote it, and their number.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        dim: int,
        entry: dict[str, Any] | None = None,
        progress: Progress | None = None,
        owner: tuple[int, int] | None = None,
    ):
        self._owner = owner
        # Opened for each read: a job may have more files than one process may hold open.
        self.path = self.name = os.fspath(path)
        try:
            self._size = durable.size(path)
            if entry is not None and self._size != entry["bytes"]:
                raise ValueError(f"{self._size} bytes where the manifest says {entry['bytes']}")
            if entry is not None and checksums.of_entry(self.path, entry, progress) != entry:
                raise ValueError("a checksum that differs from the manifest's")
            self._arrays = self._found(entry is not None)
            self._check_shapes(dim)
            if entry is not None and self.num_keys != entry["keys"]:
                raise ValueError(f"{self.num_keys} keys where the manifest says {entry['keys']}")
            self._check_values()
        except MemoryError as error:
            what = str(error) or "out of memory"
            raise MemoryError(f"{what} while {path} was read") from error
        except Exception as error:  # damaged bytes raise undocumented errors of zipfile and NumPy
            known = isinstance(error, ValueError)
            what = str(error) if known else f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} must be a whole shard file. Received: {what}") from error

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows `begin` to `end` of an array; by default all rows."""
        stored = self._arrays[name]
        if not stored.shape:
            return self._elements(stored.at, (), stored.dtype)
        end = stored.shape[0] if end is None else min(end, stored.shape[0])
        shape = (max(0, end - begin), *stored.shape[1:])
        return self._elements(stored.at + begin * stored.row_bytes, shape, stored.dtype)

    def parts(self, name: str) -> Any:
        """The rows of an array, some `CHUNK_BYTES` bytes at a time; one part if there are none."""
        stored = self._arrays[name]
        step = max(1, CHUNK_BYTES // max(1, stored.row_bytes))
        for begin in range(0, max(1, stored.shape[0]), step):
            yield self.read(name, begin, begin + step)

    def keys(self, begin, end):
        before = min(begin, 1)  # the key before them, which must be smaller
        keys = self.read("keys", begin - before, end)
        # Two files cannot hold the same key if each holds keys of its rank alone.
        rank, world_size = self._owner or (0, 1)
        if (owners(keys, world_size) != rank).any():
            of = f"rank {rank} of {world_size}"
            raise ValueError(f"{self.path} must hold keys of {of}. Received: keys of another rank")
        if not _ascend(keys):
            raise ValueError(f"{self.path} must hold each key once. Received: keys out of order")
        return keys[before:]

    def part(self, begin, end):
        found = {"keys": self.keys(begin, end)}
        others = (name for name in BY_KEY[1:] if name in self._arrays)
        found.update((name, self.read(name, begin, end)) for name in others)
        records = found.get("records")
        # A frequency, and the last step: -1 if it is not known.
        if records is not None and (records[:, :2] < (0, -1)).any():
            raise ValueError(
                f"{self.path} must hold frequencies and steps. Received: negative ones"
            )
        return TableShard(slot_names=self.slot_names, slot_widths=self.slot_widths, **found)

    def without_keys(self):
        shard = self.part(0, 0)
        if "optimizer_step" in self._arrays:
            shard.optimizer_step = int(self.read("optimizer_step"))
        if "initial_row_scale" in self._arrays:
            shard.initial_row_scale = float(self.read("initial_row_scale"))
        if "step" in self._arrays:
            shard.waiting, shard.counters = self.read("waiting"), self.read("counters")
            shard.step = int(self.read("step"))
        if "erased" in self._arrays:
            shard.erased, shard.steps = self.read("erased"), self.read("steps")
            shard.whole, shard.optimizer = bool(self.read("whole")), str(self.read("optimizer"))
        return shard

    # ---- reading and checking the file ----

    def _elements(self, at, shape, dtype):
        found = np.empty(shape, dtype)
        if not dtype.itemsize:  # strings of length 0
            return found
        durable.read_into(self.path, at, found.reshape(-1).view(np.uint8))
        return found

    def _bytes(self, at, size):
        size = max(0, min(size, self._size - at))
        return self._elements(at, (size,), np.dtype(np.uint8)).tobytes()

    def _pieces(self, at, size):
        for begin in range(at, at + size, CHUNK_BYTES):
            yield self._bytes(begin, min(CHUNK_BYTES, at + size - begin))

    def _found(self, is_checked):
        arrays: dict[str, _Stored] = {}
        with durable.open_to_read(self.path) as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in _MEMBERS or name in arrays or not info.filename.endswith(".npy"):
                    raise ValueError(f"an unknown or duplicate array {info.filename!r:.80}")
                try:
                    start = self._start_of(info, is_checked)
                    arrays[name] = self._array(start, info.file_size, *_MEMBERS[name])
                except MemoryError:
                    raise
                except Exception as error:
                    raise ValueError(f"array '{name}': {error}") from error
        missing = {*REQUIRED} - arrays.keys()
        for together in ({*OF_POLICIES}, _OF_DELTAS):
            if arrays.keys() & together:
                missing |= together - arrays.keys()
        if missing == {"records"} and arrays["keys"].shape == (0,):
            return arrays  # `compact` of version 0.1 left them out on a rank without keys
        if missing:
            raise ValueError(f"no arrays {sorted(missing)}")
        return arrays

    def _start_of(self, info, is_checked):
        """Where a member's bytes begin. Checks its CRC-32 unless the file's SHA-256 was checked."""
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError("a compressed array; dumps are not compressed")
        at = info.header_offset
        head = self._bytes(at, 30)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise ValueError(f"no header at byte {at}")
        name_bytes, extra_bytes = (int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
        start = at + 30 + name_bytes + extra_bytes
        if self._bytes(at + 30, name_bytes) != info.filename.encode():
            raise ValueError(f"a different name at byte {at + 30}")
        if info.file_size > self._size - start:
            raise ValueError(f"{info.file_size} bytes, more than the file has from byte {start} on")
        if not is_checked:
            crc = 0
            for piece in self._pieces(start, info.file_size):
                crc = zlib.crc32(piece, crc)
            if crc != info.CRC:
                raise ValueError(f"another CRC-32 of bytes {start} to {start + info.file_size}")
        return start

    def _array(self, start, size, kind, rank):
        view = self._bytes(start, min(size, 4096))
        if view[:6] != b"\x93NUMPY" or view[6:8] not in (b"\1\0", b"\2\0"):
            raise ValueError("no .npy header")
        width = 2 if view[6] == 1 else 4
        begin = 8 + width + int.from_bytes(view[8 : 8 + width], "little")
        if begin > len(view):
            raise ValueError(f"a header of {begin} bytes")
        found = _HEADER.fullmatch(view[8 + width : begin])
        if found is None:
            raise ValueError(f"a header {view[8 + width : begin]!r:.200}")
        descr = found.group(1).decode()
        shape = tuple(int(length) for length in re.findall(rb"\d+", found.group(2)))
        named = descr == kind if kind != "<U" else descr.startswith("<U")
        if not named or len(shape) != rank:
            raise ValueError(f"dtype {descr} and shape {shape}")
        dtype = np.dtype(descr)
        if math.prod(shape) * dtype.itemsize != size - begin:
            raise ValueError(f"{size - begin} bytes for shape {shape} of {descr}")
        return _Stored(start + begin, shape, dtype)

    def _check_shapes(self, dim):
        shape = {name: stored.shape for name, stored in self._arrays.items()}
        self.slot_names = [str(name) for name in self.read("slot_names")]
        self.slot_widths = [int(width) for width in self.read("slot_widths")]
        size, width = shape["keys"][0], sum(self.slot_widths)
        shapes = shape["rows"], shape["slot_rows"]
        if shapes != ((size, dim), (size, width)) or min(self.slot_widths, default=1) < 1:
            raise ValueError(
                f"{size} keys, rows {shapes[0]} and slot rows {shapes[1]} of widths "
                f"{self.slot_widths}, for a table with rows of {dim}"
            )
        if len({*self.slot_names} - {""}) != len(self.slot_widths):
            raise ValueError(f"slot names {self.slot_names} for {len(self.slot_widths)} widths")
        if shape.get("records", (size, 3)) != (size, 3):
            raise ValueError(f"records {shape['records']} of {size} keys")
        if shape.get("waiting", (0, 3))[1:] != (3,):
            raise ValueError(f"waiting keys {shape['waiting']}")
        if shape.get("steps", (0, 3))[1:] != (3,):
            raise ValueError(f"steps {shape['steps']}")
        self.num_keys = size
        by_key = (self._arrays[name] for name in BY_KEY if name in self._arrays)
        self.key_bytes = sum(stored.row_bytes for stored in by_key)

    def _check_values(self):
        """Raises ValueError for what no table can have, except in the arrays by key."""
        shard = self.without_keys()
        if shard.step < -1 or shard.optimizer_step < -1:
            raise ValueError(f"step {shard.step} and optimizer_step {shard.optimizer_step}")
        scale = shard.initial_row_scale
        if not (scale == -1 or 0 <= scale < math.inf):
            raise ValueError(f"initial_row_scale {scale}")
        if (shard.counters < 0).any() or (shard.waiting[:, 1:] < (0, -1)).any():
            raise ValueError("negative counters, or keys that wait with negative counts or steps")
        if len(np.unique(shard.waiting[:, 0])) != len(shard.waiting):
            raise ValueError("a waiting key twice")
        if shard.erased is None:
            return
        if not _ascend(shard.erased):
            raise ValueError("an erased key twice, or out of order")
        counts, _, first = shard.steps.T
        whole = np.floor(shard.steps[:, ::2]) == shard.steps[:, ::2]  # False for NaN
        if not (whole.all() and np.isfinite(shard.steps).all()):
            raise ValueError("steps that are no numbers")
        if (counts < 0).any() or (first[counts > 0] < 1).any() or counts.sum() >= 2**31:
            raise ValueError("counts of steps below 0 or beyond 2^31, or a first step below 1")


def _ascend(keys):
    """Whether each key is greater than the one before, by uint64 value."""
    keys = keys.view(np.uint64)
    return bool((keys[1:] > keys[:-1]).all())
