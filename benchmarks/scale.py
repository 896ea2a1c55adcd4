"""1M, 10M and 100M keys in one table of dim 16: rates, bytes, peak memory.

    python -m benchmarks.scale [--keys 1M,10M,100M] [--threads N] [--plot FILE] [--json FILE]

The core by itself, through `sok_like._core`. Bytes per key are those of the index and of everything
else beside the rows. They are 25 to 33. The table shows their mean over the growth and their
maximum, and the longest batch as a multiple of the median of the batches around it, by processor
time, from a million keys on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.harness import Result, machine, progress_line

DIM = 16
BATCH = 65_536
ROW_BYTES = DIM * 4
LOOKUPS = 50
GROWN = 10**6  # keys of a table whose batches are compared
AROUND = 15  # batches before a batch, and as many after it, that it is compared with
ROUNDS = 3
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}


def parse_count(text: str) -> int:
    """Converts "10M" to 10_000_000."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def needed_bytes(num_keys: int) -> int:
    """Bytes that a run may take: rows, an index about to double, and batches."""
    return num_keys * (ROW_BYTES + 41) + (1 << 30)


def free_bytes() -> int:
    """Bytes of memory that are available without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak:
    """Largest resident size, read by a thread every few milliseconds."""

    def __enter__(self):
        self.bytes = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, _resident())

    def __exit__(self, *unused):
        self._stop.set()
        self._thread.join()


def measure(num_keys: int) -> dict[str, Any]:
    """Measures one size: grows a table from empty, then looks up random keys."""
    from sok_like import _core

    before = _resident()
    table = _core.Table("scale", DIM)
    curve, seconds, beside, cpu = [], 0.0, [], []
    with _Peak() as peak:
        for start in range(0, num_keys, BATCH):
            keys = workloads.mixed(np.arange(start, min(start + BATCH, num_keys)))
            begin, cpu_begin = time.perf_counter(), time.process_time()
            table.find_or_insert(keys)
            seconds += time.perf_counter() - begin
            cpu.append(time.process_time() - cpu_begin)
            # Only sometimes: stats() walks the index, which evicts other data from the caches.
            if start // BATCH % max(1, num_keys // BATCH // 200) == 0 or start + BATCH >= num_keys:
                stats = table.stats()
                size = stats["size"]
                beside.append((stats["bytes"] - stats["arena_bytes"]) / size)
                curve.append((size, seconds, beside[-1]))
                progress_line(f"{size / 1e6:.1f}M of {num_keys / 1e6:.0f}M keys")
    rng = np.random.default_rng(0)
    times = []
    for _ in range(LOOKUPS):
        keys = workloads.mixed(rng.integers(0, num_keys, BATCH))
        begin = time.perf_counter()
        table.find(keys)
        times.append(time.perf_counter() - begin)
    stats = table.stats()
    progress_line("")
    batches = cpu[GROWN // BATCH :] if num_keys > GROWN else cpu
    longest, around = _longest(batches)
    return {
        "keys": num_keys,
        "inserts_per_second": num_keys / seconds,
        "lookups_per_second": BATCH / float(np.median(times)),
        "batches": batches,
        "longest_batch": longest / around,
        "bytes_beside_mean": float(np.mean(beside)),
        "bytes_beside_last": beside[-1],
        # Small tables have fixed costs and a first chunk, so the worst of the last nine tenths.
        "bytes_beside_worst": max(beside[len(beside) // 10 :]),
        "table_gib": stats["bytes"] / 2**30,
        "peak_gib": (peak.bytes - before) / 2**30,
        "load_factor": stats["load_factor"],
        "curve": curve,
    }


def growth(quick: bool) -> list[Result]:
    """The row of `make bench` on a table that grows to 60 million keys."""
    num_keys = 3 * GROWN if quick else 60 * GROWN
    if free_bytes() < needed_bytes(num_keys):
        return []
    rounds = [measure(num_keys)["batches"] for _ in range(ROUNDS)]
    ratios = [longest / around for longest, around in map(_longest, rounds)]
    # A batch that is long in every round is so by the table, which does the same in each.
    longest, around = _longest(np.min(rounds, axis=0))
    name, theirs = f"growth from 1M to {num_keys // GROWN}M keys", "median of those around it"
    spread = longest / around, min(ratios), max(ratios)
    return [Result(name, "longest batch", theirs, 3.0, *spread, longest * 1e3, around * 1e3)]


def _longest(seconds):
    """The batch that took longest beside the batches around it, and the median of these.

    A virtual machine's host may have to bring a page that is touched first, or may have it: batches
    of one stretch then take twice as long as those of another, whatever the table does.
    """
    windows = (seconds[max(0, i - AROUND) : i + AROUND + 1] for i in range(len(seconds)))
    pairs = [(s, float(np.median(w))) for s, w in zip(seconds, windows, strict=True)]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def text_table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| keys | inserts/s | longest batch / median around it | lookups/s "
        "| bytes per key beside the row: mean, worst, last "
        "| table GiB | peak growth of the process GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['keys'] / 1e6:g}M | {r['inserts_per_second'] / 1e6:.1f}M "
            f"| {r['longest_batch']:.1f} "
            f"| {r['lookups_per_second'] / 1e6:.1f}M "
            f"| {r['bytes_beside_mean']:.1f}, {r['bytes_beside_worst']:.1f}, "
            f"{r['bytes_beside_last']:.1f} | {r['table_gib']:.2f} | {r['peak_gib']:.2f} |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Plots bytes beside the row, and keys inserted per second, over the number of keys."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for r in results:
        size, seconds, beside = (np.array(column) for column in zip(*r["curve"], strict=True))
        label = f"{r['keys'] / 1e6:g}M keys"
        left.semilogx(size, beside, label=label)
        if len(size) > 1:
            right.semilogx(size[1:], np.diff(size) / np.diff(seconds) / 1e6, label=label)
    left.axhline(32, color="grey", linestyle=":")
    left.set(xlabel="keys", ylabel="bytes per key beside the row", ylim=(0, 60))
    right.set(xlabel="keys", ylabel="million keys inserted per second", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--keys", default="1M,10M,100M")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plot", default="out/scale.png", metavar="FILE")
    parser.add_argument("--json", default="", metavar="FILE")
    args = parser.parse_args(argv)
    from sok_like import _core

    _core.set_num_threads(args.threads)
    print("  ".join(f"{k}: {v}" for k, v in machine(args.threads).items()), flush=True)
    results = []
    for num_keys in map(parse_count, args.keys.split(",")):
        needed, free = needed_bytes(num_keys), free_bytes()
        if free < needed:
            print(
                f"{num_keys / 1e6:g}M keys are left out: they may take {needed / 2**30:.1f} GiB, "
                f"and {free / 2**30:.1f} GiB are free.",
                flush=True,
            )
            continue
        results.append(measure(num_keys))
    print(text_table(results))
    if results and args.plot:
        plot(results, args.plot)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
