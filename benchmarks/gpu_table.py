"""Device tables: keys per second, and the share of the memory bandwidth that they use.

    python -m benchmarks.gpu_table                  # 2**27 slots, 1M keys per call
    python -m benchmarks.gpu_table --log2-slots 24 --dims 32
    python -m benchmarks.gpu_table --quick          # seconds: that it runs, not how fast

Needs `sok_like._core` built with CUDA (`make cuda`, `tools/build_cuda.sh --install`), NumPy and a
device, but neither TensorFlow nor CuPy. `benchmarks/gpu_bench.py` says how calls are timed. The
share of the copy bandwidth counts the bytes that a call must move:

    find, find_or_insert    key, 16 digests, key and row number of the slot, row in and out
    assign                  the same: a present key, its row read from the batch and written
    insert                  key, digests and slot in and out, new row out
    update                  row number, gradient, row and slot rows in and out
    sums by key             position of the row, gradient in, row of sums out
    step                    each key; its row out and its gradient in; each unique key's slot, row
                            and slot rows in, and the rows out again

Lookups of tables with admission or eviction follow for one `dim`, see `benchmarks/gpu_policies.py`.
If PyTorch sees the device, its `embedding` and `embedding_bag` on indices (no hash table) are timed
beside `find`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from benchmarks import gpu_policies
from benchmarks.gpu_bench import FACTOR, Bench, Sizes, Timing

PROBE_BYTES = 8 + 16 + 8 + 4 + 1  # key, digests, slot, flag


QUICK = Sizes(
    log2_slots=12,
    batch=128,
    dims=(4,),
    loads=(0.5, 0.95),
    update_keys=512,
    step_batch=16,
    step_features=3,
    step_vocabulary=50,
    num_batches=2,
    calls=2,
    repeats=1,
    copy_floats=1000,
)


def step_bytes(keys: np.ndarray, dim: int) -> float:
    """Bytes per key that a step with Adagrad must move; `keys` `[batches, ...]`."""
    unique = np.mean([np.unique(part).size for part in keys]) / keys[0].size
    return 8 + 2 * 4 * dim + unique * (PROBE_BYTES + 4 * dim * (1 + 2 * 2))


class TableBench(Bench):
    """The measurements of tables without policies."""

    def lookups(self, dim: int, load: float) -> None:
        sizes, core = self.sizes, self.core
        # Batches are counted as new until the device has reported that their keys are present. Room
        # for a few of them keeps the table from growing, which would halve the load.
        spare = 3 * sizes.batch
        num_keys = min(int(load * 2**sizes.log2_slots), int(0.97 * 2**sizes.log2_slots) - spare - 1)
        table = core.CudaTable("gpu", dim, initial_capacity=num_keys + spare, max_load_factor=0.97)
        parts = self.parts(num_keys)
        # The last parts are timed: new keys in a table with nearly this load.
        num_timed = min(len(parts) // 2, 8)
        for part in parts[:-num_timed]:
            table.row_numbers(self.upload(part), insert=True)
        arrays = [self.upload(part) for part in parts[-num_timed:]]
        numbers = self.up(np.zeros(sizes.batch, np.uint32))
        fresh = iter(arrays)

        def insert() -> None:
            keys = next(fresh)
            table.row_numbers(keys, insert=True, out=numbers if len(keys) == sizes.batch else None)

        timing = self.burst(insert, num_timed)
        before = table.stats()
        label = f"dim {dim:3} load {before['load_factor']:.2f}"
        mean = sum(map(len, arrays)) // num_timed
        self.report(f"insert              {label}", mean, 2 * PROBE_BYTES + 4 * dim, timing)
        batches = itertools.cycle(self.batches(num_keys))
        rows = self.up(np.zeros((sizes.batch, dim), np.float32))
        flags = self.up(np.zeros(sizes.batch, np.uint8))
        row_bytes = PROBE_BYTES + 2 * 4 * dim
        calls = {
            "find": lambda: table.find(next(batches), rows=rows, found=flags),
            "find_or_insert": lambda: table.find_or_insert(
                next(batches), rows=rows, inserted=flags
            ),
            "assign": lambda: table.assign(next(batches), rows),
        }
        for name, call in calls.items():
            self.report(f"{name:19} {label}", sizes.batch, row_bytes, self.time(call))
        after = table.stats()
        if (after["size"], after["num_buckets"]) != (num_keys, before["num_buckets"]):
            raise AssertionError(f"the table has changed meanwhile: {before}, {after}")

    def updates(self, dim: int, rule: str, num_slots: int) -> None:
        sizes, core = self.sizes, self.core
        table = core.CudaTable("gpu", dim, initial_capacity=sizes.update_keys)
        for part in self.parts(sizes.update_keys):
            table.row_numbers(self.upload(part), insert=True)
        # Distinct batches without repeated keys.
        count = min(sizes.batch, sizes.update_keys // sizes.num_batches)
        keys = self.rng.permutation(sizes.update_keys)[: count * sizes.num_batches] * FACTOR
        numbers = itertools.cycle(
            [table.row_numbers(self.up(part)) for part in keys.reshape(-1, count)]
        )
        grads = self.up(np.full((count, dim), 0.01, np.float32))
        steps = itertools.count(1)
        timing = self.time(
            lambda: core.cuda_apply_gradients_to_rows(
                table, rule, 0.01, next(steps), next(numbers), grads
            )
        )
        moved = 4 + 4 * dim + 2 * 4 * dim * (1 + num_slots)
        self.report(f"update {rule:12} dim {dim:3}", count, moved, timing)

    def steps(self) -> None:
        """26 features with 100k keys each, drawn by Zipf's law, in one table; Adagrad."""
        sizes, core, dim = self.sizes, self.core, 16
        shape = (sizes.num_batches, sizes.step_batch, sizes.step_features)
        weights = 1 / np.arange(1, sizes.step_vocabulary + 1) ** 1.05
        ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), self.rng.random(shape))
        keys = ranks.astype(np.int64) * sizes.step_features + np.arange(sizes.step_features)
        keys *= FACTOR
        batches = itertools.cycle([self.up(part.reshape(-1)) for part in keys])
        count = sizes.step_batch * sizes.step_features
        rows = self.up(np.zeros((count, dim), np.float32))
        grads = self.up(np.full((count, dim), 0.01, np.float32))
        flags = self.up(np.zeros(count, np.uint8))
        num_steps = itertools.count(1)
        moved = step_bytes(keys, dim)

        def table_of_all() -> Any:
            table = core.CudaTable(
                "gpu", dim, initial_capacity=sizes.step_features * sizes.step_vocabulary + 2 * count
            )
            table.row_numbers(self.up(np.unique(keys)), insert=True)
            return table

        table = table_of_all()

        def by_key() -> None:
            """The optimizer gets keys and finds equal ones itself."""
            batch = next(batches)
            table.find_or_insert(batch, rows=rows, inserted=flags)
            core.cuda_apply_gradients(table, "adagrad", 0.01, next(num_steps), batch, grads)

        self.report(f"step adagrad dim {dim} by key", count, moved, self.time(by_key))
        table = table_of_all()

        def by_row() -> None:
            """Keys are made unique once; the host waits for their number."""
            distinct, inverse, _ = core.cuda_unique_with_inverse(next(batches))
            numbers = table.row_numbers(distinct, insert=True)
            core.cuda_combine_of_table(table, numbers, inverse, None, "none")
            sums = core.cuda_combine_gradient(grads, inverse, None, len(distinct), "none")
            core.cuda_apply_gradients_to_rows(
                table, "adagrad", 0.01, next(num_steps), numbers, sums
            )

        self.report(f"step adagrad dim {dim} by row", count, moved, self.time(by_row))
        for examples in (sizes.step_batch, sizes.step_batch // 8):
            self.grouped_step(keys[:, :examples])

    def grouped_step(self, keys: np.ndarray) -> None:
        """The same with one table per feature: `keys` `[batches, examples, features]`."""
        sizes, core, dim = self.sizes, self.core, 16
        examples = keys.shape[1]
        features = range(sizes.step_features)
        room = sizes.step_vocabulary + 2 * sizes.step_batch
        tables = [core.CudaTable(f"gpu{f}", dim, initial_capacity=room) for f in features]
        for f in features:
            tables[f].row_numbers(self.up(np.unique(keys[..., f])), insert=True)
        batches = itertools.cycle([[self.up(part[:, f]) for f in features] for part in keys])
        rows = [self.up(np.zeros((examples, dim), np.float32)) for _ in features]
        grad = self.up(np.full((examples, dim), 0.01, np.float32))
        num_steps = itertools.count(1)

        def step() -> None:
            batch = next(batches)
            core.cuda_group_lookup(tables, batch, rows)
            core.cuda_group_apply_gradients(
                tables, "adagrad", 0.01, next(num_steps), batch, [grad] * len(tables)
            )

        name = f"step adagrad dim {dim}, {len(tables)} tables of {examples}"
        self.report(name, keys[0].size, step_bytes(keys, dim), self.time(step))

    def hot_keys(self) -> None:
        """Sums of gradients by key, where one key takes none, half or most of the positions."""
        count, dim = self.sizes.step_batch, 16
        grads = self.up(np.full((count, dim), 0.01, np.float32))
        for percent in (0, 50, 90):
            rows = self.rng.integers(0, count, count).astype(np.int32)
            rows[self.rng.random(count) < percent / 100] = count // 2
            inverse = self.up(rows)

            def sums(inverse: Any = inverse) -> None:
                self.core.cuda_combine_gradient(grads, inverse, None, count, "none")

            name = f"sums by key dim {dim}, one key {percent} %"
            self.report(name, count, 4 + 2 * 4 * dim, self.time(sums))

    def torch_embedding(self, dim: int) -> None:
        """Times PyTorch's gathers on indices, if PyTorch is installed and sees the device."""
        try:
            import torch
        except ImportError:
            return
        if self.core.__name__ == "_cuda_emulated" or not torch.cuda.is_available():
            return
        self._torch_lookups(torch, dim)
        torch.cuda.empty_cache()

    def _torch_lookups(self, torch: Any, dim: int) -> None:
        sizes = self.sizes
        table = torch.rand((2**sizes.log2_slots // 2, dim), device="cuda")
        indices = torch.randint(0, len(table), (sizes.num_batches, sizes.batch), device="cuda")
        batches = itertools.cycle(indices)
        offsets = torch.arange(sizes.batch, device="cuda")
        functional = torch.nn.functional
        calls = {
            "torch embedding": lambda: functional.embedding(next(batches), table),
            "torch embedding_bag": lambda: functional.embedding_bag(
                next(batches), table, offsets, mode="sum"
            ),
        }
        for name, call in calls.items():
            times = []
            for _ in range(sizes.repeats + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin = time.perf_counter()
                start.record()
                for _ in range(sizes.calls):
                    call()
                end.record()
                host = time.perf_counter() - begin
                torch.cuda.synchronize()
                times.append(
                    Timing(start.elapsed_time(end) / 1e3 / sizes.calls, host / sizes.calls)
                )
            median = statistics.median_low([timing.device for timing in times[1:]])
            timing = next(timing for timing in times if timing.device == median)
            self.report(f"{name:19} dim {dim:3} on indices", sizes.batch, 8 + 8 * dim, timing)


def run(core: Any, sizes: Sizes, json_file: str | None = None) -> list[dict[str, Any]]:
    """Measures everything that fits into device memory, says what did not, and returns the figures.

    `json_file` is written after each measurement, in case the time runs out.
    """
    bench = TableBench(core, sizes)
    tasks: list[tuple[str, Any]] = [("step", bench.steps), ("hot keys", bench.hot_keys)]
    # The width of the published figures comes first, in case the time runs out.
    dims = sorted(sizes.dims, key=lambda dim: dim != 32)
    for dim in dims:
        for load in sizes.loads:
            tasks.append((f"dim {dim} load {load}", lambda d=dim, x=load: bench.lookups(d, x)))
        tasks.append((f"torch dim {dim}", lambda d=dim: bench.torch_embedding(d)))
        for rule, num_slots in (("adagrad", 1), ("lazy_adam", 2), ("adam", 2)):
            tasks.append(
                (f"{rule} dim {dim}", lambda d=dim, r=rule, n=num_slots: bench.updates(d, r, n))
            )
    lookups = gpu_policies.lookups
    tasks.append((f"policies dim {dims[0]}", lambda: lookups(bench, dims[0], PROBE_BYTES)))
    for name, task in tasks:
        try:
            task()
        except core.CudaError as error:
            print(f"{name}: skipped ({error})")
        core.cuda_release_memory()  # for PyTorch, and in one piece for the next table
        if json_file:
            with open(json_file, "w") as file:
                json.dump(bench.figures, file, indent=1)
    return bench.figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only that it runs")
    parser.add_argument("--emulated", action="store_true", help="without a device; with --quick")
    parser.add_argument("--log2-slots", type=int, default=Sizes.log2_slots)
    parser.add_argument("--dims", type=int, nargs="+", default=Sizes.dims)
    parser.add_argument("--loads", type=float, nargs="+", default=Sizes.loads)
    parser.add_argument("--json", help="file to write the figures to as well")
    arguments = parser.parse_args()
    if arguments.emulated:
        from tests.memories import emulated

        core = emulated()
    else:
        from sok_like import _core as core

    if core is None or core.cuda_device_count() == 0:
        print(
            "No CUDA device, or `_core` was built without CUDA (`make cuda`): nothing to measure."
        )
        return 0
    sizes = Sizes(
        log2_slots=arguments.log2_slots, dims=tuple(arguments.dims), loads=tuple(arguments.loads)
    )
    run(core, QUICK if arguments.quick else sizes, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
