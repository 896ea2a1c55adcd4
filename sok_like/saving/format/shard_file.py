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
a few parts of `CHUNK_BYTES` bytes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
from typing import Any

import numpy as np

from sok_like.saving.format import durable
from sok_like.saving.format.checksums import RunningChecksum
from sok_like.saving.format.npz import Layout
from sok_like.saving.format.progress import Progress
from sok_like.table.content import TableShard

CHUNK_BYTES = 2**22  # bytes that are read and written at a time: the memory is used again at once
_WRITERS = 2  # threads
_WAITING = 4  # arrays that wait for them at most


def write_shard(
    folder: str, name: str, shard: TableShard, progress: str | None = None
) -> dict[str, Any]:
    """Writes one rank's shard to a temporary file, flushes it to the disk, and renames it.

    Args:
        progress: The call whose progress rank 0 prints; None: it prints nothing.

    Returns:
        `file`, `bytes`, `checksum` and `keys` (their number), as the manifest lists them.

    Raises:
        OSError: the file could not be written; names the file.
    """
    durable.make_folder(folder)
    arrays = _arrays_of(shard)
    layout = Layout({each: (array.shape, array.dtype) for each, array in arrays.items()})
    with durable.written(durable.join(folder, name)) as file:
        output = _Output(file, Progress(progress, layout.size) if progress else None)
        with output.threads:
            _write_arrays(output, layout, arrays, shard)
    checksum = output.checksum.checksum(layout.size)
    return {"file": name, "bytes": layout.size, "checksum": checksum, "keys": len(shard.keys)}


class _Output:
    """Writes and hashes arrays on threads, while the next part of a table is read."""

    def __init__(self, file, progress):
        self._file, self._progress, self.checksum = file, progress, RunningChecksum()
        self.threads = concurrent.futures.ThreadPoolExecutor(_WRITERS)
        self._waiting: collections.deque = collections.deque()

    def put(self, at: int, data: Any) -> None:
        """Writes bytes, or an array that nobody changes, at a position; raises earlier errors."""
        if not len(data):
            return
        data = memoryview(data)
        self._waiting.append(self.threads.submit(self._write, at, data))
        self.wait(_WAITING)
        if self._progress is not None:
            self._progress.add(data.nbytes)

    def wait(self, left: int = 0) -> None:
        """Waits until at most so many arrays are left to write."""
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def _write(self, at, data):
        self.checksum.add(at, data)
        begin, size = at, data.nbytes
        while data:
            written = os.pwrite(self._file.fileno(), data, at)
            at, data = at + written, data[written:]
        durable.begin_flush(self._file, begin, size)


def _write_arrays(output, layout, arrays, shard):
    for at, header in layout.npy_headers():
        output.put(at, header)
    by_key = {name: arrays[name] for name in shard.by_key()}
    for name in arrays.keys() - by_key.keys():
        output.put(layout.begins[name], arrays[name].tobytes())
    row_bytes = {
        name: array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        for name, array in by_key.items()
    }
    begin = 0
    for part in shard.parts(max(1, CHUNK_BYTES // max(1, sum(row_bytes.values())))):
        for name, array in by_key.items():
            rows = np.ascontiguousarray(part[name], array.dtype)
            output.put(layout.begins[name] + begin * row_bytes[name], rows.reshape(-1).view("u1"))
        begin += len(part["keys"])
    if begin != len(shard.keys):
        raise ValueError(f"A table must have {len(shard.keys)} keys. Received: {begin} keys of it")
    output.wait()
    for at, header in layout.zip_headers(output.checksum.crc):
        output.put(at, header)
    output.wait()


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
