"""One rank's file of a dump: an `.npz` that NumPy reads.

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

Neither writing nor reading (`shard_reader.py`) holds the file in memory: each takes
a few parts of `PIECE` bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from sok_like.saving.format import durable
from sok_like.saving.format.progress import Progress
from sok_like.table.content import Content

PIECE = 2**24  # bytes that are read, written and hashed at a time


class Column:
    """An array by key that is computed part by part while it is written.

    Args:
        shape: Of the whole array.
        dtype: Of its elements.
        part: Called in order with `begin`, `end` and the keys of these rows (None for the array
            of keys itself). Returns the elements, which must not change afterwards.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, part: Callable[..., np.ndarray]):
        self.shape, self.dtype, self.part = shape, np.dtype(dtype), part
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def __len__(self):
        return self.shape[0]


@dataclasses.dataclass
class Shard(Content):
    """One rank's part of a dump. While it is written, arrays by key may be `Column`s."""

    erased: np.ndarray | None = None  # int64 [num_erased]; all of these are for deltas only
    whole: bool = False
    steps: np.ndarray | None = None  # float64 [num_runs, 3]
    optimizer: str = ""


def write_shard(
    folder: str, name: str, shard: Shard, progress: str | None = None
) -> dict[str, Any]:
    """Writes one rank's shard to a temporary file, flushes it to the disk, and renames it.

    Args:
        folder: Folder; created if it is missing.
        name: Name of the file.
        shard: The content.
        progress: The call whose progress rank 0 prints; None: it prints nothing.

    Returns:
        `file`, `bytes`, `sha256` and `keys` (their number), as the manifest lists them.

    Raises:
        OSError: the file could not be written; names the file.
    """
    durable.make_folder(folder)
    arrays = _arrays_of(shard)
    size = sum(array.nbytes for array in arrays.values())
    with durable.written(durable.join(folder, name)) as file:
        sink = _Sink(file, Progress(progress, size) if progress else None)
        with contextlib.closing(sink):
            _write_arrays(sink, arrays)
        if sink.error is not None:
            raise sink.error
    digest = sink.digest.hexdigest()
    return {"file": name, "bytes": sink.bytes, "sha256": digest, "keys": len(shard.keys)}


class _Behind:
    """Runs a function on a thread of its own, one call behind: at most two calls' data is held."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function, self._last = function, None
        self._threads = concurrent.futures.ThreadPoolExecutor(1)

    def __call__(self, data):
        self.wait()
        self._last = self._threads.submit(self._function, data)

    def wait(self):
        if self._last is not None:
            self._last.result()

    def end(self):
        self._threads.shutdown()


class _Sink:
    """The file that zipfile writes to. It keeps the first error and then ignores all data.

    Otherwise zipfile would fail a second time when it closes, and a third in its destructor.
    """

    def __init__(self, file, progress):
        self._file, self._progress = file, progress
        self.bytes, self.error, self.digest = 0, None, hashlib.sha256()
        # The next part of a table is read while the previous one is written and hashed.
        self._behind = _Behind(self._write), _Behind(self.digest.update)

    def read(self, at, num_bytes):
        """Reads back what was written at `at`; raises `error` if that failed."""
        self._behind[0].wait()
        data = b"" if self.error is not None else os.pread(self._file.fileno(), num_bytes, at)
        if len(data) != num_bytes:
            raise self.error or OSError(errno.EIO, os.strerror(errno.EIO))
        return data

    def write(self, data):
        """Writes bytes, or a memoryview of data that nobody changes."""
        for work in self._behind:
            work(data)
        self.bytes += len(data)
        if self._progress is not None:
            self._progress.add(len(data))
        return len(data)

    def _write(self, data):
        left = memoryview(data)
        try:
            while self.error is None and len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error

    def close(self):
        """Call it when everything is written, or nothing more will be."""
        for work in self._behind:
            work.end()

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
        "initial_row_scale": np.asarray(shard.initial_row_scale, np.float64),
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
    keys_at = 0
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                if isinstance(array, Column):
                    begins = _write_column(member, array, sink, keys_at)
                    keys_at = begins if name == "keys" else keys_at
                else:
                    array = np.asarray(array, order="C")
                    np.lib.format.write_array(member, array, allow_pickle=False)


def _write_column(member, column, sink, keys_at):
    """Writes it part by part; keys are read back from the file. Returns where elements begin."""
    descr = np.lib.format.dtype_to_descr(column.dtype)
    header = {"descr": descr, "fortran_order": False, "shape": column.shape}
    np.lib.format.write_array_header_1_0(member, header)
    begins, size = sink.bytes, len(column)
    step = max(1, PIECE * size // max(1, column.nbytes))
    for begin in range(0, size, step):
        end, keys = min(begin + step, size), None
        if keys_at:
            keys = np.frombuffer(sink.read(keys_at + 8 * begin, 8 * (end - begin)), np.int64)
        member.write(memoryview(column.part(begin, end, keys)).cast("B"))
    return begins
