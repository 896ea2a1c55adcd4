"""One rank's file of a dump: an `.npz` that NumPy reads, and that is read here without trust.

The file is uncompressed. Its arrays are `keys` int64 `[size]`, `rows` float32 `[size, dim]`,
`slot_rows` float32 `[size, sum of slot widths]`, `slot_names`, `slot_widths` and `optimizer_step`,
the steps that the slot rows have behind them. A table with policies adds `records` int64
`[size, 3]` (frequency, last step, custom score), `waiting` int64 `[num_waiting, 3]` (key, count,
last step), `counters` int64 of a Bloom filter, and `step`. A delta adds `erased` int64
`[num_erased]`, `whole` (1 where the keys replace all others of their rank), and the steps that move
the rows it does not hold, `steps` float64 `[num_runs, 3]` (count, learning rate, number of the
first; count 0: there every row was brought up to date) of the `optimizer` named.

NaN in a slot row means that the key came while no optimizer was attached: the optimizer's initial
value takes its place.

Reading takes the memory of the file, once: the arrays are views of its bytes. Sizes are checked
before anything is made of them, and each array's CRC-32 covers its header as well.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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

from sok_like.table.progress import Progress

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
    "erased": ("<i8", 1),
    "whole": ("<i8", 0),
    "steps": ("<f8", 2),
    "optimizer": ("<U", 0),
}
_PIECE = 2**24  # bytes hashed at a time
_REQUIRED = {"keys", "rows", "slot_rows", "slot_names", "slot_widths"}
_OF_POLICIES = {"records", "waiting", "counters", "step"}
_OF_DELTAS = {"erased", "whole", "steps", "optimizer"}
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
    erased: np.ndarray | None = None  # int64 [num_erased]; None but in a delta, as those below
    whole: bool = False
    steps: np.ndarray | None = None  # float64 [num_runs, 3]
    optimizer: str = ""


def write_shard(
    folder: str, name: str, shard: Shard, progress: str | None = None
) -> dict[str, Any]:
    """Writes one rank's part, aside, through to the disk, and renamed.

    Args:
        folder: Made where it is missing.
        name: Of the file.
        shard: What to write.
        progress: Of what call rank 0 says how far it is; None: it is silent.

    Returns:
        `file`, `bytes`, `sha256` and `keys` (how many), as the manifest lists them.

    Raises:
        OSError: the folder cannot be written; it names the file.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    aside, arrays = path / f"{name}.tmp", _arrays_of(shard)
    size = sum(np.asarray(array).nbytes for array in arrays.values())
    try:
        with open(aside, "wb", buffering=0) as file, _hashing() as update:
            sink = _Sink(file, update, Progress(progress, size) if progress else None)
            _write_arrays(sink, arrays)
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
    digest = update.digest.hexdigest()
    return {"file": name, "bytes": sink.bytes, "sha256": digest, "keys": len(shard.keys)}


class _Hashing:
    """SHA-256 of what is written, on a thread of its own, one write behind."""

    def __init__(self, threads):
        self.digest = hashlib.sha256()
        self._threads, self._last = threads, None

    def __call__(self, data):
        self.wait()  # so that no more than two writes are in memory
        self._last = self._threads.submit(self.digest.update, data)

    def wait(self):
        if self._last is not None:
            self._last.result()


@contextlib.contextmanager
def _hashing():
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        hashing = _Hashing(threads)
        yield hashing
        hashing.wait()


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

    def __init__(self, file, update, progress):
        self._file, self._update, self._progress = file, update, progress
        self.bytes, self.error = 0, None

    def write(self, data):
        data = bytes(data)  # which nobody changes before it is hashed
        self._update(data)
        left = memoryview(data)
        try:
            while self.error is None and len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        self.bytes += len(data)
        if self._progress is not None:
            self._progress.add(len(data))
        return len(data)

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
    if shard.erased is not None:
        arrays["erased"], arrays["steps"] = shard.erased, shard.steps
        arrays["whole"] = np.asarray(shard.whole, np.int64)
        arrays["optimizer"] = np.asarray(shard.optimizer)
    return arrays


def _write_arrays(sink, arrays):
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def read_shard(
    path: pathlib.Path,
    dim: int,
    entry: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Shard:
    """Reads one file and checks it.

    Args:
        path: The file.
        dim: Row width.
        entry: What the manifest says of it; None for dumps of version 1, which said nothing.
        progress: Is told the bytes that have been read.

    Raises:
        ValueError: damaged, or of wrong shapes; it names the file and what in it.
    """
    try:
        arrays = _read_arrays(_read_bytes(path, entry, progress), entry is not None)
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
        if "erased" in arrays:
            shard.erased, shard.steps = arrays["erased"], arrays["steps"]
            shard.whole, shard.optimizer = bool(arrays["whole"]), str(arrays["optimizer"])
        _check_shapes(shard, dim)
    except Exception as error:  # what zipfile and NumPy raise of damaged bytes is not listed
        # As text: an error that a local variable holds would hold the file's bytes with it.
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must be a whole shard file. Received: {what}") from error
    return shard


def _read_bytes(path, entry, progress):
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if entry is not None and size != entry["bytes"]:
            raise ValueError(f"{size} bytes where the manifest says {entry['bytes']}")
        data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of {size}")
    if entry is not None and _sha256(data, progress) != entry["sha256"]:
        raise ValueError("bytes of another SHA-256 than the manifest says")
    return data


def _sha256(data, progress):
    digest, view = hashlib.sha256(), memoryview(data)
    for begin in range(0, len(view), _PIECE):
        piece = view[begin : begin + _PIECE]
        digest.update(piece)
        if progress is not None:
            progress.add(len(piece))
    return digest.hexdigest()


def _read_arrays(data, is_checked):
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in _MEMBERS or name in arrays or not info.filename.endswith(".npy"):
                raise ValueError(f"an array {info.filename!r:.80}, which no dump has or only once")
            try:
                arrays[name] = _array(_member(data, info, is_checked), *_MEMBERS[name])
            except Exception as error:
                raise ValueError(f"array '{name}': {error}") from error
    missing = _REQUIRED - arrays.keys()
    for together in (_OF_POLICIES, _OF_DELTAS):
        if arrays.keys() & together:
            missing |= together - arrays.keys()
    if missing:
        raise ValueError(f"no arrays {sorted(missing)}")
    return arrays


def _member(data, info, is_checked):
    """The bytes of a member, a view; by the manifest's SHA-256 they may be known to be right."""
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
    if not is_checked and zlib.crc32(view) != info.CRC:
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
    if shard.steps is not None and shard.steps.shape[1:] != (3,):
        raise ValueError(f"steps {shard.steps.shape}")
