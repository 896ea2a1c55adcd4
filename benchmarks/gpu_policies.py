"""Training lookups of device tables with admission or eviction, and of a table without policies.

Run by `benchmarks/gpu_table.py`. A case is `find_or_insert` of one batch:

    no policy         all keys present; asynchronous
    filter present    all keys present, in a table with `filter_freq`: each has a record to count in
    filter waiting    no key admitted yet: each is counted among the waiting ones
    lru full          at capacity, a sixteenth of the batch new: as many rows go, lowest step first

Lookups of tables with policies wait for the device, so their time is the host's too. The bytes that
a call must move are those of `gpu_table`, and a record read and written for each present key; for
a waiting key the slot and the count of the filter instead; for a new key in the place of an old
one both slots, both records and the new row. What the selection of the lowest rows reads of all
records is not among them.
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
    """All cases, over tables of the same size."""
    sizes = bench.sizes
    num_keys = sizes.update_keys
    present = probe_bytes + 2 * 4 * dim
    timing, table = _present(bench, dim, {})
    bench.report(f"lookup no policy      dim {dim:3}", sizes.batch, present, timing)
    del table  # before there is another
    timing, table = _present(bench, dim, {"filter_freq": NEVER})
    moved = present + 2 * RECORD
    bench.report(f"lookup filter present dim {dim:3}", sizes.batch, moved, timing)

    # Of keys that were never written, the same few batches: they wait from the first call on.
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
    # Room for batches that are booked as if they were new, as in `gpu_table`.
    table = bench.core.CudaTable(
        "gpu", dim, initial_capacity=sizes.update_keys + 3 * sizes.batch, policy=policy
    )
    _fill(bench, table)
    batches = itertools.cycle(bench.batches(sizes.update_keys))
    return bench.time(_lookup(bench, table, dim, batches)), table


def _full(bench: Bench, dim: int, probe_bytes: int) -> None:
    sizes = bench.sizes
    num_keys, num_calls = sizes.update_keys, _num_calls(bench)
    # Old keys are drawn from the upper half. What was not looked up since it was written goes
    # lowest key first, so only the lower half goes, as it is large enough.
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
    """Keys 0 .. update_keys - 1, written: admitted whatever the policy."""
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
