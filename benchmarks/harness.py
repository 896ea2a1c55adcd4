"""Interleaved timing: contenders take turns in one process, and only their ratios count.

    round 1   ours ours ours | peer peer peer      a turn is a burst of calls: its median is the
    round 2   peer peer peer | ours ours ours      turn's time
    ...
    ratio = median over rounds of (ours / peer) in that round

On a shared machine, speed drifts over seconds: two turns of one round see nearly the same machine,
two runs do not. Turns are bursts because in training a step follows its own kind and finds its own
data in the caches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass
class Contender:
    """Something to time.

    Attributes:
        call: Does the work of call number i and returns when it is done.
        prepare: Prepares call number i; not timed.
        warm_up: Calls before the first round.
    """

    call: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None
    warm_up: int = 5


@dataclasses.dataclass(frozen=True)
class Match:
    """A ratio to report: `ours / peer`, at most `target` if that is not None."""

    name: str
    ours: str
    peer: str
    target: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a match. Times are in milliseconds, medians over rounds."""

    name: str
    ours: str
    peer: str
    target: float | None
    ratio: float
    ratio_low: float  # quartiles over rounds
    ratio_high: float
    ours_ms: float
    peer_ms: float

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target


def interleave(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    burst: int = 3,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times of each contender's turns in milliseconds, one per round; the order alternates."""
    calls = dict.fromkeys(contenders, 0)

    def timed(name):
        contender, i = contenders[name], calls[name]
        calls[name] += 1
        if contender.prepare is not None:
            contender.prepare(i)
        start = clock()
        contender.call(i)
        return (clock() - start) * 1e3

    for name, contender in contenders.items():
        for i in range(contender.warm_up):
            progress(f"{name}: warm-up {i + 1}/{contender.warm_up}")
            timed(name)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(rounds):
        for name in list(contenders)[:: 1 if r % 2 == 0 else -1]:
            progress(f"{name}: round {r + 1}/{rounds}")
            times[name].append(statistics.median(timed(name) for _ in range(burst)))
    return times


def judge(times: Mapping[str, Sequence[float]], matches: Sequence[Match]) -> list[Result]:
    """Computes the results of matches from the times of turns."""
    results = []
    for match in matches:
        ours, peer = times[match.ours], times[match.peer]
        ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
        low, high = _quartiles(ratios)
        results.append(
            Result(
                **dataclasses.asdict(match),
                ratio=statistics.median(ratios),
                ratio_low=low,
                ratio_high=high,
                ours_ms=statistics.median(ours),
                peer_ms=statistics.median(peer),
            )
        )
    return results


def _quartiles(values):
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def publish(results: Sequence[Result], machine: Any, path: str = "") -> None:
    """Prints results as a table; writes them to a JSON file, too, if a path is given."""
    print("\n" + table(results))
    if path:
        record = {"machine": machine, "results": [dataclasses.asdict(r) for r in results]}
        with open(path, "w") as file:
            json.dump(record, file, indent=1)


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table."""
    header = ["against, in the same run", "ours ms", "theirs ms", "ratio", "target", "met"]
    rows = [
        [
            f"{r.name} / {r.peer}" + (f" (ours: {r.ours})" if r.ours != "ours" else ""),
            f"{r.ours_ms:.2f}",
            f"{r.peer_ms:.2f}",
            f"{r.ratio:.3f} ({r.ratio_low:.3f}-{r.ratio_high:.3f})",
            "" if r.target is None else f"<= {r.target:g}",
            {None: "", True: "yes", False: "NO"}[r.met],
        ]
        for r in results
    ]
    widths = [max(len(row[c]) for row in [header, *rows]) for c in range(len(header))]

    def line(cells):
        return (
            "| " + " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)) + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def machine(threads: int) -> dict[str, Any]:
    """The machine and versions on which the figures depend."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor():
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def progress_line(text: str) -> None:
    """Overwrites one line of a terminal; prints nothing without one."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}"[:120])
        sys.stderr.flush()
