"""Common parts of the measurements of device tables: sizes, timing of bursts, one line per figure.

A time is between two device events around a burst of calls: the median of several bursts, after one
to warm up. "host" after a figure means that the host took as long to launch the calls, so the
device waited. Batches are distinct, and their rows are several times the size of the device's
cache. Bandwidth is that of a device-to-device copy in the same run, counting reads and writes.
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
    """Sizes of the measurements; the defaults are those of peers' published figures."""

    log2_slots: int = 27
    batch: int = 1 << 20
    dims: tuple[int, ...] = (8, 32, 64, 128)
    loads: tuple[float, ...] = (0.5, 0.75, 0.95)
    update_keys: int = 1 << 24
    step_batch: int = 65536
    step_features: int = 26
    step_vocabulary: int = 100_000
    num_batches: int = 8  # distinct batches
    calls: int = 20
    repeats: int = 5
    copy_floats: int = 1 << 28


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: on the device, and on the host to launch it."""

    device: float
    host: float


class Bench:
    """Times calls on one device and prints one line per measurement."""

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
        """The median over repeats, after one burst to warm up."""
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
        shape = (self.sizes.num_batches, self.sizes.batch)
        keys = self.rng.integers(0, num_keys, shape, dtype=np.int64) * FACTOR
        return [self.up(part) for part in keys]

    def parts(self, num_keys: int) -> list[range]:
        """The numbers of all keys, in batches."""
        starts = range(0, num_keys, self.sizes.batch)
        return [range(b, min(b + self.sizes.batch, num_keys)) for b in starts]

    def upload(self, part: range) -> Any:
        return self.up_keys(np.arange(part.start, part.stop))

    def up_keys(self, numbers: np.ndarray) -> Any:
        return self.up(numbers * FACTOR)
