"""Shared by the measurements of device tables: sizes, timing of bursts, one line per figure.

Times are between two events of the device around a burst of calls, the median of several bursts
after one to warm up; "host" behind a figure says that the host took as long to hand the calls over,
so that the device waited. Batches are distinct and their rows several times the size of the
device's cache. Bandwidth is that of a device-to-device copy, reads and writes counted, measured in
the same run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

FACTOR = 2654435761  # key i of a table is i * FACTOR


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
    num_batches: int = 8  # distinct ones
    calls: int = 20
    repeats: int = 5
    copy_floats: int = 1 << 28


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: on the device, and for the host to hand it over."""

    device: float
    host: float


class Bench:
    """Times calls on one device and prints a line for each."""

    def __init__(self, core: Any, sizes: Sizes) -> None:
        self.core = core
        self.sizes = sizes
        self.rng = np.random.default_rng(0)
        self.figures: list[dict[str, Any]] = []
        info = core.cuda_device_info()
        print(
            f"{info['name']}, {info['num_multiprocessors']} multiprocessors, "
            f"{info['l2_bytes'] >> 20} MiB of L2, {info['free_bytes'] >> 30} of "
            f"{info['bytes'] >> 30} GiB free, driver {info['driver']}, runtime {info['runtime']}, "
            f"{time.strftime('%Y-%m-%d')}"
        )
        self.bandwidth = self._bandwidth()
        print(f"copy bandwidth {self.bandwidth / 1e9:.0f} GB/s (reads and writes)")

    def burst(self, call: Callable[[], Any], calls: int) -> Timing:
        """Time of one call in a burst of `calls`."""
        start, end = self.core.CudaEvent(), self.core.CudaEvent()
        self.core.cuda_synchronize()
        begin = time.perf_counter()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        host = time.perf_counter() - begin
        return Timing(end.seconds_since(start) / calls, host / calls)

    def time(self, call: Callable[[], Any]) -> Timing:
        """Median over repeats, after one burst that warms up."""
        bursts = [self.burst(call, self.sizes.calls) for _ in range(self.sizes.repeats + 1)][1:]
        return sorted(bursts, key=lambda timing: timing.device)[len(bursts) // 2]

    def report(self, name: str, keys: int, bytes_per_key: float, timing: Timing) -> None:
        seconds = timing.device
        rate = keys / seconds / 1e9
        share = keys * bytes_per_key / seconds / self.bandwidth
        late = "  host" if timing.host > 0.9 * seconds else ""
        print(
            f"{name:44} {rate:7.3f} billion keys/s {seconds * 1e3:8.3f} ms "
            f"{share:6.1%} of bandwidth{late}",
            flush=True,
        )
        self.figures.append(
            {"name": name, "billion_keys_per_s": rate, "seconds": seconds, "share": share}
        )

    def up(self, values: np.ndarray) -> Any:
        return self.core.CudaArray(np.ascontiguousarray(values))

    def _bandwidth(self) -> float:
        source = self.up(np.ones(self.sizes.copy_floats, np.float32))
        target = self.up(np.zeros(self.sizes.copy_floats, np.float32))
        timing = self.time(lambda: self.core.cuda_copy(target, source))
        return 2 * 4 * self.sizes.copy_floats / timing.device

    def batches(self, num_keys: int) -> list[Any]:
        """Random present keys."""
        shape = (self.sizes.num_batches, self.sizes.batch)
        keys = self.rng.integers(0, num_keys, shape, dtype=np.int64) * FACTOR
        return [self.up(part) for part in keys]

    def parts(self, num_keys: int) -> list[range]:
        """Numbers of all keys, in batches."""
        starts = range(0, num_keys, self.sizes.batch)
        return [range(b, min(b + self.sizes.batch, num_keys)) for b in starts]

    def upload(self, part: range) -> Any:
        return self.up_keys(np.arange(part.start, part.stop))

    def up_keys(self, numbers: np.ndarray) -> Any:
        return self.up(numbers * FACTOR)
