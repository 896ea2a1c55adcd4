"""Training lookups of device tables with admission or eviction, and of a table without policies.

`benchmarks/gpu_table.py` runs this. A case is `find_or_insert` of one batch:

    no policy         all keys present; asynchronous
    filter present    all keys present, in a table with `filter_freq`: each has a record to update
    filter waiting    no key admitted yet: each is counted among the waiting keys
    lru full          at capacity, 1/16 of the batch new: as many keys go, lowest step first

Lookups of tables with policies wait for the device, so their time includes the host's. The bytes
that a call must move are those of `gpu_table`, plus a record read and written per present key. For
a waiting key they are the slot and the count of the filter instead. For a new key that replaces an
old one they are both slots, both records and the new row. The records read to select the lowest
scores are not counted.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.gpu_bench import Bench, Timing

RECORD = 32  # bytes of a record
COUNT = 16  # bytes of a waiting key's row
NEVER = 1 << 30  # a frequency that no key reaches


def lookups(bench: Bench, dim: int, probe_bytes: int) -> None:
    """Runs all cases, on tables of the same size."""
    sizes = bench.sizes
    num_keys = sizes.update_keys
    present = probe_bytes + 2 * 4 * dim
    timing, table = _present(bench, dim, {})
    bench.report(f"lookup no policy      dim {dim:3}", sizes.batch, present, timing)
    del table  # frees it before the next one is made
    timing, table = _present(bench, dim, {"filter_freq": NEVER})
    moved = present + 2 * RECORD
    bench.report(f"lookup filter present dim {dim:3}", sizes.batch, moved, timing)

    # The same few batches of keys that were never written: they wait from the first call on.
    first = num_keys
    waiting = []
    for _ in range(sizes.num_batches):
        waiting.append(bench.upload(range(first, first + sizes.batch)))
        first += sizes.batch
    before = table.statistics()
    timing = bench.time(_lookup(bench, table, dim, itertools.cycle(waiting)))
    after = table.statistics()
    _require(after["admitted"] == before["admitted"] == 0, after)
    _require(after["waiting"] == len(waiting) * sizes.batch, after)
    _require(after["refused"] - before["refused"] == _num_calls(bench) * sizes.batch, after)
    moved = (probe_bytes - 12) + (probe_bytes - 9) + 2 * COUNT + 4 * dim
    bench.report(f"lookup filter waiting dim {dim:3}", sizes.batch, moved, timing)
    del table, waiting
    _full(bench, dim, probe_bytes)


def _present(bench: Bench, dim: int, policy: dict[str, Any]) -> tuple[Timing, Any]:
    sizes = bench.sizes
    # Room for batches that are counted as new at first, as in `gpu_table`.
    table = bench.core.CudaTable(
        "gpu", dim, initial_capacity=sizes.update_keys + 3 * sizes.batch, policy=policy
    )
    _fill(bench, table)
    batches = itertools.cycle(bench.batches(sizes.update_keys))
    return bench.time(_lookup(bench, table, dim, batches)), table


def _full(bench: Bench, dim: int, probe_bytes: int) -> None:
    sizes = bench.sizes
    num_keys, num_calls = sizes.update_keys, _num_calls(bench)
    # Old keys are drawn from the upper half. Keys not looked up since they were written are evicted
    # lowest key first, so only keys of the lower half are evicted; it is large enough.
    num_new = max(1, min(sizes.batch // 16, num_keys // 2 // num_calls))
    numbers = bench.rng.integers(num_keys // 2, num_keys, (num_calls, sizes.batch))
    numbers[:, :num_new] = num_keys + np.arange(num_calls * num_new).reshape(-1, num_new)
    batches = iter([bench.up_keys(part) for part in numbers])
    table = bench.core.CudaTable(
        "gpu", dim, initial_capacity=num_keys, max_capacity=num_keys, policy={"score": "lru"}
    )
    _fill(bench, table)
    timing = bench.time(_lookup(bench, table, dim, batches))
    statistics = table.statistics()
    _require(statistics["size"] == num_keys, statistics)
    _require(statistics["evicted"] == statistics["admitted"] == num_calls * num_new, statistics)
    present = probe_bytes + 2 * 4 * dim + 2 * RECORD
    new = 2 * 2 * probe_bytes + 2 * 4 * dim + 3 * RECORD
    share = num_new / sizes.batch
    moved = (1 - share) * present + share * new
    bench.report(f"lookup lru full       dim {dim:3}", sizes.batch, moved, timing)


def _fill(bench: Bench, table: Any) -> None:
    """Writes keys 0 .. update_keys - 1, which admits them under every policy."""
    for part in bench.parts(bench.sizes.update_keys):
        table.row_numbers(bench.upload(part), insert=True)


def _lookup(bench: Bench, table: Any, dim: int, batches: Any) -> Any:
    rows = bench.up(np.zeros((bench.sizes.batch, dim), np.float32))
    flags = bench.up(np.zeros(bench.sizes.batch, np.uint8))
    return lambda: table.find_or_insert(next(batches), rows=rows, inserted=flags)


def _num_calls(bench: Bench) -> int:
    """Number of calls that `Bench.time` makes."""
    return bench.sizes.calls * (bench.sizes.repeats + 1)


def _require(holds: bool, statistics: dict[str, int]) -> None:
    if not holds:
        raise AssertionError(f"the case does not measure what it says: {statistics}")
