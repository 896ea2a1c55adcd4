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

from typing import Any

import numpy as np

from sok_like.saving.format import array_files
from sok_like.table.content import TableShard

CHUNK_BYTES = 2**22  # bytes that are read and written at a time: the memory is used again at once


def write_shard(
    folder: str, name: str, shard: TableShard, progress: str | None = None
) -> dict[str, Any]:
    """Writes one rank's shard, as `array_files.written` does; returns its entry in the manifest."""
    arrays, by_key = _arrays_of(shard), shard.by_key()
    shapes = {each: (array.shape, array.dtype) for each, array in arrays.items()}
    row_bytes = {
        each: array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        for each, array in by_key.items()
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
            required = f"A table must have {len(shard.keys)} keys"
            raise ValueError(f"{required}. Received: {begin} keys of it")
    return {**file.entry, "keys": len(shard.keys)}


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
