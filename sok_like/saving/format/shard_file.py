"""One rank's file of a dump: an `.npz` that NumPy reads, written and read a few MiB at a time.

The file is uncompressed. Its arrays are `keys` int64 `[size]`, `rows` float32 `[size, dim]`,
`slot_rows` float32 `[size, sum of slot widths]`, `slot_names`, `slot_widths`, `optimizer_step`
(steps that the slot rows have gone through), and `initial_row_scale`, a float64: the factor by
which weight decay has shrunk the rows of absent keys. A table with policies adds `records` int64
`[size, 3]` (frequency, last step, custom score), `waiting` int64 `[num_waiting, 3]` (key, count,
last step), `counters` int64 of a Bloom filter, and `step`. A delta adds `erased` int64
`[num_erased]`, `whole` (1 if the keys replace all others of their rank), and the log of the steps
that moved rows which it does not hold: `steps` float64 `[num_runs, 3]` (count, learning rate,
number of the first step; count 0: every row was brought up to date then) of the `optimizer` named.

NaN in a slot row means that the key was inserted while no optimizer was attached; it is replaced by
the optimizer's initial value.

A reader trusts nothing. Sizes are checked before memory is allocated for them. The manifest's
checksum covers every byte (`checksums.py`). A right checksum proves that the file is as it was
written, not that it was written rightly. So what no table can have is refused, too: a key twice, a
key of another rank, negative counts and steps.
"""

import dataclasses
import math
import os
import re
import zipfile
from typing import Any

import numpy as np

from sok_like.saving.format import array_files, checksums, durable
from sok_like.saving.format.progress import Progress
from sok_like.table.content import BY_KEY, OF_POLICIES, REQUIRED, TableShard
from sok_like.table.keys import owners

CHUNK_BYTES = 2**22  # bytes that are read and written at a time: the memory is used again at once
# The dtype of each array, as `.npy` headers name it, and its number of axes.
_MEMBERS = {
    "keys": ("<i8", 1),
    "rows": ("<f4", 2),
    "slot_rows": ("<f4", 2),
    "slot_names": ("<U", 1),
    "slot_widths": ("<i8", 1),
    "optimizer_step": ("<i8", 0),
    "initial_row_scale": ("<f8", 0),
    "waiting": ("<i8", 2),
    "counters": ("<i8", 1),
    "step": ("<i8", 0),
    "records": ("<i8", 2),
    "erased": ("<i8", 1),
    "steps": ("<f8", 2),
    "whole": ("<i8", 0),
    "optimizer": ("<U", 0),
}
_OF_DELTAS = ("erased", "steps", "whole", "optimizer")
# What an array's member begins with. NumPy's own parser would compile a header as Python.
_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\0(..)|\x02\0(....))"
    rb"(\{'descr': '([<|][A-Za-z]\d{1,6})', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,19}(?:, ?\d{1,19})*,?)?)\), \} *\n)",
    re.DOTALL,
)
_HEADER_BYTES = 2**12  # of a header at most


def write_shard(
    folder: str, name: str, shard: TableShard, progress: str | None = None
) -> dict[str, Any]:
    """Writes one rank's shard, as `array_files.written` does; returns its entry in the manifest."""
    absent: tuple[str, ...] = OF_POLICIES if shard.records is None else ()
    absent += _OF_DELTAS if shard.erased is None else ()
    arrays = {
        member: np.asarray(getattr(shard, member), dtype)
        for member, (dtype, _) in _MEMBERS.items()
        if member not in absent
    }
    by_key = shard.by_key()
    shapes = {each: (array.shape, array.dtype) for each, array in arrays.items()}
    row_bytes = {
        each: array.itemsize * math.prod(array.shape[1:]) for each, array in by_key.items()
    }
    with array_files.written(folder, name, shapes, progress) as file:
        for each in arrays.keys() - by_key.keys():
            file.put(each, arrays[each])
        begin = 0
        for part in shard.parts(max(1, CHUNK_BYTES // max(1, sum(row_bytes.values())))):
            for each, array in by_key.items():
                file.put(each, np.asarray(part[each], array.dtype), begin * row_bytes[each])
            begin += len(part["keys"])
        if begin != len(shard.keys):
            raise durable.wrong("A table", f"have {len(shard.keys)} keys", f"{begin} keys of it")
    return {**file.entry, "keys": len(shard.keys)}


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
        return self.part(0, 0)


class ShardFile(ShardSource):
    """A shard of right checksums, which `owner` (rank, ranks) wrote."""

    def __init__(
        self,
        path: str | os.PathLike,
        dim: int,
        entry: dict[str, Any],
        progress: Progress | None = None,
        owner: tuple[int, int] = (0, 1),
    ):
        self._owner = owner
        # Opened for each read: a job may have more files than one process may hold open.
        self.path = self.name = os.fspath(path)
        try:
            self._size = durable.size(path)
            if self._size != entry["bytes"]:
                raise ValueError(f"{self._size} bytes where the manifest says {entry['bytes']}")
            if checksums.of_file(self.path, progress) != entry["checksum"]:
                raise ValueError("a checksum that differs from the manifest's")
            self._arrays = self._found()
            self._check_shapes(dim)
            if self.num_keys != entry["keys"]:
                raise ValueError(f"{self.num_keys} keys where the manifest says {entry['keys']}")
            self._check_values()
        except MemoryError as error:
            what = str(error) or "out of memory"
            raise MemoryError(f"{what} while {path} was read") from error
        except Exception as error:  # damaged bytes raise undocumented errors of zipfile and NumPy
            is_ours = isinstance(error, ValueError)
            what = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise durable.wrong(self.path, "be a whole shard file", what) from error

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows `begin` to `end` of an array; by default all rows."""
        stored = self._arrays[name]
        at, shape = stored.at, stored.shape
        if shape:
            end = shape[0] if end is None else min(end, shape[0])
            at, shape = at + begin * stored.row_bytes, (max(0, end - begin), *shape[1:])
        elements = np.empty(shape, stored.dtype)
        if stored.dtype.itemsize:  # not strings of length 0
            durable.read_into(self.path, at, elements.reshape(-1).view(np.uint8))
        return elements

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
        rank, world_size = self._owner
        if (owners(keys, world_size) != rank).any():
            required = f"hold keys of rank {rank} of {world_size}"
            raise durable.wrong(self.path, required, "keys of another rank")
        if not _ascend(keys):
            raise durable.wrong(self.path, "hold each key once", "keys out of order")
        return keys[before:]

    def part(self, begin, end):
        arrays = {"keys": self.keys(begin, end)}
        others = [name for name in BY_KEY[1:] if name in self._arrays]
        arrays |= {name: self.read(name, begin, end) for name in others}
        # A frequency, and the last step: -1 if it is not known.
        if "records" in arrays and (arrays["records"][:, :2] < (0, -1)).any():
            raise durable.wrong(self.path, "hold frequencies and steps", "negative ones")
        return TableShard(slot_names=self.slot_names, slot_widths=self.slot_widths, **arrays)

    def without_keys(self):
        shard = super().without_keys()
        for name in self._arrays.keys() - {*BY_KEY, "slot_names", "slot_widths"}:
            array = self.read(name)
            setattr(shard, name, array if array.shape else array.item())
        return shard

    def _found(self):
        arrays: dict[str, _Stored] = {}
        with durable.open_to_read(self.path) as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in _MEMBERS or name in arrays or not info.filename.endswith(".npy"):
                    raise ValueError(f"an unknown or duplicate array {info.filename!r:.80}")
                try:
                    arrays[name] = self._array(archive, info, *_MEMBERS[name])
                except MemoryError:
                    raise
                except Exception as error:
                    raise ValueError(f"array '{name}': {error}") from error
        missing = {*REQUIRED} - arrays.keys()
        for together in ({*OF_POLICIES}, {*_OF_DELTAS}):
            if arrays.keys() & together:
                missing |= together - arrays.keys()
        if missing:
            raise ValueError(f"no arrays {sorted(missing)}")
        return arrays

    def _array(self, archive, info, kind, num_axes):
        """Finds a member's elements, and does not read them."""
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError("a compressed array; dumps are not compressed")
        with archive.open(info) as member:  # which compares its name with the directory's
            header = _HEADER.match(member.read(_HEADER_BYTES))
        lengths = durable.read(self.path, info.header_offset + 26, 4)  # of its name, of the rest
        start = info.header_offset + 30 + int(np.frombuffer(lengths, "<u2").sum())
        if info.file_size > self._size - start:
            raise ValueError(f"{info.file_size} bytes, more than the file has from byte {start} on")
        if header is None or int.from_bytes(header[1] or header[2], "little") != len(header[3]):
            raise ValueError("no .npy header")
        descr, num_bytes = header[4].decode(), info.file_size - header.end()
        shape = tuple(map(int, re.findall(rb"\d+", header[5])))
        is_named = descr == kind or (kind == "<U" and descr.startswith(kind))
        if not is_named or len(shape) != num_axes:
            raise ValueError(f"dtype {descr} and shape {shape}")
        dtype = np.dtype(descr)
        if math.prod(shape) * dtype.itemsize != num_bytes:
            raise ValueError(f"{num_bytes} bytes for shape {shape} of {descr}")
        return _Stored(start + header.end(), shape, dtype)

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
        if shape.get("records", (size,))[0] != size:
            raise ValueError(f"records {shape['records']} of {size} keys")
        for name in {"records", "waiting", "steps"} & shape.keys():
            if shape[name][1] != 3:
                raise ValueError(f"{name} of shape {shape[name]}")
        self.num_keys = size
        by_key = [self._arrays[name] for name in BY_KEY if name in self._arrays]
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
        are_whole = np.floor(shard.steps[:, ::2]) == shard.steps[:, ::2]  # False for NaN
        if not (are_whole.all() and np.isfinite(shard.steps).all()):
            raise ValueError("steps that are no numbers")
        if (counts < 0).any() or (first[counts > 0] < 1).any() or counts.sum() >= 2**31:
            raise ValueError("counts of steps below 0 or beyond 2^31, or a first step below 1")


def _ascend(keys):
    """Whether each key is greater than the one before, by uint64 value."""
    keys = keys.view(np.uint64)
    return bool((keys[1:] > keys[:-1]).all())
