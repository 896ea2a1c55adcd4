"""One rank's file of a dump: an `.npz` that NumPy reads, and that is read here without trust.

The file is uncompressed. Its arrays are `keys` int64 `[size]`, `rows` float32 `[size, dim]`,
`slot_rows` float32 `[size, sum of slot widths]`, `slot_names`, `slot_widths` and `optimizer_step`,
the steps that the slot rows have behind them. A table with policies adds `records` int64
`[size, 3]` (frequency, last step, custom score), `waiting` int64 `[num_waiting, 3]` (key, count,
last step), `counters` int64 of a Bloom filter, and `step`. NaN in a slot row means that the key
came while no optimizer was attached: the optimizer's initial value takes its place.

Reading takes the memory of the file, once: the arrays are views of its bytes. Sizes are checked
before anything is made of them, and each array's CRC-32 covers its header as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import os
import pathlib
import re
import zipfile
import zlib
from typing import Any

import numpy as np

# dtypes as `.npy` headers name them, and the number of axes.
_MEMBERS = {
    "keys": ("<i8", 1),
    "rows": ("<f4", 2),
    "slot_rows": ("<f4", 2),
    "slot_names": ("<U", 1),
    "slot_widths": ("<i8", 1),
    "optimizer_step": ("<i8", 0),
    "records": ("<i8", 2),
    "waiting": ("<i8", 2),
    "counters": ("<i8", 1),
    "step": ("<i8", 0),
}
_REQUIRED = {"keys", "rows", "slot_rows", "slot_names", "slot_widths"}
_OF_POLICIES = {"records", "waiting", "counters", "step"}
_HEADER = re.compile(
    rb"\{'descr': '([<|][A-Za-z]\d{1,6})', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,19}(?:, ?\d{1,19})*,?)?)\), \} *\n"
)


def _no_waiting():
    return np.zeros([0, 3], np.int64)


def _no_counters():
    return np.zeros([0], np.int64)


@dataclasses.dataclass
class Shard:
    """Keys, rows and slot rows of one instant, and what policies know of them."""

    keys: np.ndarray  # int64 [size]
    rows: np.ndarray  # float32 [size, dim]
    slot_rows: np.ndarray  # float32 [size, sum(slot_widths)]
    slot_names: list[str]
    slot_widths: list[int]
    records: np.ndarray | None = None  # int64 [size, 3], None where there are none
    waiting: np.ndarray = dataclasses.field(default_factory=_no_waiting)  # int64 [num_waiting, 3]
    counters: np.ndarray = dataclasses.field(default_factory=_no_counters)  # int64 [num_counters]
    step: int = -1  # -1: not known
    optimizer_step: int = -1  # -1: not known


def write_shard(folder: str, name: str, shard: Shard) -> dict[str, Any]:
    """Writes one rank's part, aside, through to the disk, and renamed.

    Returns:
        `file`, `bytes`, `sha256` and `keys` (how many), as the manifest lists them.

    Raises:
        OSError: the folder cannot be written; it names the file.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    aside = path / f"{name}.tmp"
    try:
        with open(aside, "wb", buffering=0) as file:
            sink = _Sink(file)
            _write_arrays(sink, _arrays_of(shard))
            if sink.error is None:
                os.fsync(file.fileno())
        if sink.error is not None:
            raise sink.error
        os.replace(aside, path / name)
        sync_folder(path)
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path / name)) from error
    finally:
        aside.unlink(missing_ok=True)
    digest = sink.digest.hexdigest()
    return {"file": name, "bytes": sink.bytes, "sha256": digest, "keys": len(shard.keys)}


def sync_folder(path: pathlib.Path) -> None:
    """Makes renames in a folder survive a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Sink:
    """Where zipfile writes to. It remembers the first failure and takes the rest in silence.

    zipfile would otherwise fail a second time when it closes, and a third in its destructor.
    """

    def __init__(self, file):
        self._file = file
        self.digest, self.bytes, self.error = hashlib.sha256(), 0, None

    def write(self, data):
        view = memoryview(data).cast("B")
        left = view
        try:
            while self.error is None and len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        self.digest.update(view)
        self.bytes += len(view)
        return len(view)

    def flush(self):
        pass


def _arrays_of(shard):
    arrays = {
        "keys": shard.keys,
        "rows": shard.rows,
        "slot_rows": shard.slot_rows,
        "slot_names": np.asarray(shard.slot_names, dtype=np.str_),
        "slot_widths": np.asarray(shard.slot_widths, dtype=np.int64),
        "optimizer_step": np.asarray(shard.optimizer_step, np.int64),
    }
    if shard.step >= 0:
        arrays["waiting"], arrays["counters"] = shard.waiting, shard.counters
        arrays["step"] = np.asarray(shard.step, np.int64)
    if shard.records is not None:
        arrays["records"] = shard.records
    return arrays


def _write_arrays(sink, arrays):
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def read_shard(path: pathlib.Path, dim: int, entry: dict[str, Any] | None = None) -> Shard:
    """Reads one file and checks it.

    Args:
        path: The file.
        dim: Row width.
        entry: What the manifest says of it; None for dumps of version 1, which said nothing.

    Raises:
        ValueError: damaged, or of wrong shapes; it names the file and what in it.
    """
    try:
        arrays = _read_arrays(_read_bytes(path, entry))
        shard = Shard(
            keys=arrays["keys"],
            rows=arrays["rows"],
            slot_rows=arrays["slot_rows"],
            slot_names=[str(name) for name in arrays["slot_names"]],
            slot_widths=[int(width) for width in arrays["slot_widths"]],
            records=arrays.get("records"),
            optimizer_step=int(arrays.get("optimizer_step", -1)),
        )
        if "step" in arrays:
            shard.waiting, shard.counters = arrays["waiting"], arrays["counters"]
            shard.step = int(arrays["step"])
        _check_shapes(shard, dim)
    except Exception as error:  # what zipfile and NumPy raise of damaged bytes is not listed
        # As text: an error that a local variable holds would hold the file's bytes with it.
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must be a whole shard file. Received: {what}") from error
    return shard


def _read_bytes(path, entry):
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if entry is not None and size != entry["bytes"]:
            raise ValueError(f"{size} bytes where the manifest says {entry['bytes']}")
        data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of {size}")
    if entry is not None and hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError("bytes of another SHA-256 than the manifest says")
    return data


def _read_arrays(data):
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in _MEMBERS or name in arrays or not info.filename.endswith(".npy"):
                raise ValueError(f"an array {info.filename!r:.80}, which no dump has or only once")
            try:
                arrays[name] = _array(_member(data, info), *_MEMBERS[name])
            except Exception as error:
                raise ValueError(f"array '{name}': {error}") from error
    missing = _REQUIRED - arrays.keys()
    if arrays.keys() & _OF_POLICIES:
        missing |= _OF_POLICIES - arrays.keys()
    if missing:
        raise ValueError(f"no arrays {sorted(missing)}")
    return arrays


def _member(data, info):
    """The bytes of a member, a view."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError("compressed, which no dump is")
    at = info.header_offset
    head = data[at : at + 30]
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise ValueError(f"no header at byte {at}")
    name_bytes, extra_bytes = (int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
    start = at + 30 + name_bytes + extra_bytes
    if data[at + 30 : at + 30 + name_bytes] != info.filename.encode():
        raise ValueError(f"another name at byte {at + 30}")
    if info.file_size > len(data) - start:
        raise ValueError(f"{info.file_size} bytes, more than the file has from byte {start} on")
    view = memoryview(data)[start : start + info.file_size]
    if zlib.crc32(view) != info.CRC:
        raise ValueError(f"another CRC-32 of bytes {start} to {start + info.file_size}")
    return view


def _array(view, kind, rank):
    if bytes(view[:6]) != b"\x93NUMPY" or bytes(view[6:8]) not in (b"\1\0", b"\2\0"):
        raise ValueError("no .npy header")
    width = 2 if view[6] == 1 else 4
    begin = 8 + width + int.from_bytes(view[8 : 8 + width], "little")
    if begin > min(len(view), 4096):
        raise ValueError(f"a header of {begin} bytes")
    found = _HEADER.fullmatch(bytes(view[8 + width : begin]))
    if found is None:
        raise ValueError(f"a header {bytes(view[8 + width : begin])!r:.200}")
    descr = found.group(1).decode()
    shape = tuple(int(length) for length in re.findall(rb"\d+", found.group(2)))
    named = descr == kind if kind != "<U" else descr.startswith("<U")
    if not named or len(shape) != rank:
        raise ValueError(f"dtype {descr} and shape {shape}")
    dtype = np.dtype(descr)
    if math.prod(shape) * dtype.itemsize != len(view) - begin:
        raise ValueError(f"{len(view) - begin} bytes for shape {shape} of {descr}")
    return np.ndarray(shape, dtype, buffer=view, offset=begin)


def _check_shapes(shard, dim):
    size, width = len(shard.keys), sum(shard.slot_widths)
    shapes = shard.rows.shape, shard.slot_rows.shape
    if shapes != ((size, dim), (size, width)) or min(shard.slot_widths, default=1) < 1:
        raise ValueError(
            f"{size} keys, rows {shapes[0]} and slot rows {shapes[1]} of widths "
            f"{shard.slot_widths}, for a table with rows of {dim}"
        )
    if len(shard.slot_names) != len(shard.slot_widths) or "" in shard.slot_names:
        raise ValueError(f"slot names {shard.slot_names} for {len(shard.slot_widths)} widths")
    if shard.records is not None and shard.records.shape != (size, 3):
        raise ValueError(f"records {shard.records.shape} of {size} keys")
    if shard.waiting.shape[1:] != (3,):
        raise ValueError(f"waiting keys {shard.waiting.shape}")
