"""Device tables: keys a second, and the share of the memory bandwidth that they use.

    python -m benchmarks.gpu_table                  # 2**27 slots, 1M keys a call
    python -m benchmarks.gpu_table --log2-slots 24 --dims 32

Needs `sok_like._core` built with CUDA (`make cuda`, `tools/build_cuda.sh --install`), NumPy and a
device; neither TensorFlow nor CuPy. Bandwidth is that of a device-to-device copy, reads and writes
counted, measured in the same run. The share of it counts the bytes that a call must move:

    find, find_or_insert    key, 16 digests, key and row number of the slot, row in and out
    update                  row number, gradient, row and slot rows in and out
    step                    lookup and update of all keys, each counted as above

Where PyTorch sees the device, its `embedding` on indices (no hash table) is timed beside `find`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from typing import Any

import numpy as np

PROBE_BYTES = 8 + 16 + 8 + 4 + 1  # key, digests, slot, flag


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure with; the defaults are those of the published figures of peers."""

    log2_slots: int = 27
    batch: int = 1 << 20
    dims: tuple[int, ...] = (8, 32, 64, 128)
    loads: tuple[float, ...] = (0.5, 0.75, 0.95)
    update_keys: int = 1 << 24
    step_batch: int = 65536
    step_features: int = 26
    step_vocabulary: int = 100_000
    calls: int = 20
    repeats: int = 5
    copy_floats: int = 1 << 28


class Bench:
    """Times calls on one device and prints a line for each."""

    def __init__(self, core: Any, sizes: Sizes) -> None:
        self.core = core
        self.sizes = sizes
        self.rng = np.random.default_rng(0)
        self.bandwidth = self._bandwidth()
        print(f"copy bandwidth {self.bandwidth / 1e9:.0f} GB/s (reads and writes)")

    def seconds(self, call: Any, calls: int | None = None) -> float:
        """Median over repeats of the time of one call, in a burst of `calls`."""
        calls = self.sizes.calls if calls is None else calls
        times = []
        for _ in range(self.sizes.repeats + 1):
            self.core.cuda_synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.core.cuda_synchronize()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times[1:])  # the first one warms up

    def report(self, name: str, keys: int, bytes_per_key: float, seconds: float) -> None:
        share = keys * bytes_per_key / seconds / self.bandwidth
        print(
            f"{name:44} {keys / seconds / 1e9:7.3f} billion keys/s "
            f"{seconds * 1e3:8.3f} ms {share:6.1%} of bandwidth"
        )

    def up(self, values: np.ndarray) -> Any:
        return self.core.CudaArray(np.ascontiguousarray(values))

    def _bandwidth(self) -> float:
        source = self.up(np.ones(self.sizes.copy_floats, np.float32))
        target = self.up(np.zeros(self.sizes.copy_floats, np.float32))
        seconds = self.seconds(lambda: self.core.cuda_copy(target, source))
        return 2 * 4 * self.sizes.copy_floats / seconds

    def batches(self, num_keys: int, count: int = 8) -> list[Any]:
        """Random present keys: key i of the table is i * 2654435761."""
        shape = (count, self.sizes.batch)
        keys = self.rng.integers(0, num_keys, shape, dtype=np.int64) * 2654435761
        return [self.up(part) for part in keys]

    def lookups(self, dim: int, load: float) -> None:
        sizes, core = self.sizes, self.core
        num_keys = int(load * 2**sizes.log2_slots)
        table = core.CudaTable("gpu", dim, initial_capacity=num_keys, max_load_factor=0.96)
        fill = range(0, num_keys, sizes.batch)
        new = [np.arange(b, min(b + sizes.batch, num_keys)) * 2654435761 for b in fill]
        for part in new[:-4]:
            table.row_numbers(self.up(part), insert=True)
        # The last ones are timed: new keys into a table of this load.
        arrays = [self.up(part) for part in new[-4:]]
        core.cuda_synchronize()
        start = time.perf_counter()
        for array in arrays:
            table.row_numbers(array, insert=True)
        core.cuda_synchronize()
        seconds = time.perf_counter() - start
        label = f"dim {dim:3} load {table.stats()['load_factor']:.2f}"
        self.report(
            f"insert              {label}",
            sum(map(len, arrays)),
            PROBE_BYTES + 12 + 4 * dim,
            seconds,
        )
        batches = itertools.cycle(self.batches(num_keys))
        rows = self.up(np.zeros((sizes.batch, dim), np.float32))
        flags = self.up(np.zeros(sizes.batch, np.uint8))
        row_bytes = PROBE_BYTES + 2 * 4 * dim
        seconds = self.seconds(lambda: table.find(next(batches), rows=rows, found=flags))
        self.report(f"find                {label}", sizes.batch, row_bytes, seconds)
        seconds = self.seconds(
            lambda: table.find_or_insert(next(batches), rows=rows, inserted=flags)
        )
        self.report(f"find_or_insert      {label}", sizes.batch, row_bytes, seconds)

    def updates(self, dim: int, rule: str, num_slots: int) -> None:
        sizes, core = self.sizes, self.core
        table = core.CudaTable("gpu", dim, initial_capacity=sizes.update_keys)
        for begin in range(0, sizes.update_keys, sizes.batch):
            end = min(begin + sizes.batch, sizes.update_keys)
            table.row_numbers(self.up(np.arange(begin, end) * 2654435761), insert=True)
        count = min(sizes.batch, sizes.update_keys)
        keys = self.rng.permutation(sizes.update_keys)[:count].astype(np.int64) * 2654435761
        numbers = table.row_numbers(self.up(keys))
        grads = self.up(np.full((count, dim), 0.01, np.float32))
        steps = itertools.count(1)
        seconds = self.seconds(
            lambda: core.cuda_apply_gradients_to_rows(
                table, rule, 0.01, next(steps), numbers, grads
            )
        )
        moved = 4 + 4 * dim + 2 * 4 * dim * (1 + num_slots)
        self.report(f"update {rule:12} dim {dim:3}", count, moved, seconds)

    def step(self) -> None:
        """26 features of 100k keys each, drawn by Zipf's law; one table; Adagrad."""
        sizes, core, dim = self.sizes, self.core, 16
        shape = (4, sizes.step_batch, sizes.step_features)
        weights = 1 / np.arange(1, sizes.step_vocabulary + 1) ** 1.05
        ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), self.rng.random(shape))
        keys = ranks.astype(np.int64) * sizes.step_features + np.arange(sizes.step_features)
        batches = itertools.cycle([self.up(part.reshape(-1)) for part in keys])
        count = sizes.step_batch * sizes.step_features
        table = core.CudaTable(
            "gpu", dim, initial_capacity=sizes.step_features * sizes.step_vocabulary
        )
        rows = self.up(np.zeros((count, dim), np.float32))
        grads = self.up(np.full((count, dim), 0.01, np.float32))
        flags = self.up(np.zeros(count, np.uint8))
        steps = itertools.count(1)

        def run() -> None:
            batch = next(batches)
            table.find_or_insert(batch, rows=rows, inserted=flags)
            core.cuda_apply_gradients(table, "adagrad", 0.01, next(steps), batch, grads)

        seconds = self.seconds(run)
        unique = np.mean([np.unique(part).size for part in keys]) / count
        lookup = PROBE_BYTES + 2 * 4 * dim
        update = 4 * dim + unique * (4 + 2 * 4 * dim * 2)  # every gradient, every unique row
        self.report(f"step adagrad dim {dim}", count, lookup + update, seconds)

    def torch_embedding(self, dim: int) -> None:
        """PyTorch's gather on indices, where it is installed and sees the device."""
        try:
            import torch
        except ImportError:
            return
        if self.core.__name__ == "_cuda_emulated" or not torch.cuda.is_available():
            return
        table = torch.zeros((2**self.sizes.log2_slots // 2, dim), device="cuda")
        indices = torch.randint(0, len(table), (8, self.sizes.batch), device="cuda")
        batches = itertools.cycle(indices)
        call = torch.nn.functional.embedding
        torch.cuda.synchronize()
        times = []
        for _ in range(self.sizes.repeats + 1):
            start = time.perf_counter()
            for _ in range(self.sizes.calls):
                call(next(batches), table)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / self.sizes.calls)
        self.report(
            f"torch embedding     dim {dim:3} on indices",
            self.sizes.batch,
            8 + 2 * 4 * dim,
            statistics.median(times[1:]),
        )


def run(core: Any, sizes: Sizes) -> None:
    """Measures everything that fits into device memory; says what did not."""
    bench = Bench(core, sizes)
    tasks: list[tuple[str, Any]] = []
    for dim in sizes.dims:
        for load in sizes.loads:
            tasks.append((f"dim {dim} load {load}", lambda d=dim, x=load: bench.lookups(d, x)))
        tasks.append((f"torch dim {dim}", lambda d=dim: bench.torch_embedding(d)))
        for rule, num_slots in (("adagrad", 1), ("lazy_adam", 2), ("adam", 2)):
            tasks.append(
                (f"{rule} dim {dim}", lambda d=dim, r=rule, n=num_slots: bench.updates(d, r, n))
            )
    tasks.append(("step", bench.step))
    for name, task in tasks:
        try:
            task()
        except core.CudaError as error:
            print(f"{name}: skipped ({error})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2-slots", type=int, default=Sizes.log2_slots)
    parser.add_argument("--dims", type=int, nargs="+", default=Sizes.dims)
    parser.add_argument("--loads", type=float, nargs="+", default=Sizes.loads)
    arguments = parser.parse_args()
    from sok_like import _core

    if _core.cuda_device_count() == 0:
        print(
            "No CUDA device, or `_core` was built without CUDA (`make cuda`): nothing to measure."
        )
        return 0
    run(
        _core,
        Sizes(
            log2_slots=arguments.log2_slots,
            dims=tuple(arguments.dims),
            loads=tuple(arguments.loads),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
