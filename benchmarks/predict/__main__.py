"""Predicts the time of a training step on any number of ranks, by the model of `model.py`.

    python -m benchmarks.predict --measure --machine machine.json     constants of this host
    python -m benchmarks.predict --machine machine.json --tables 26 --batch 8192 --dim 16 \\
        --ranks 1 2 16 128 1024 --ranks-per-host 8

It prints a line per number of ranks: the time, its terms, and the largest of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.predict.model import TERMS, Machine, Workload, counts, predict
from sok_like.planner.tables import aligned
from sok_like.runtime.checks import check_integer, require

HELPS = {
    "ops": "larger batches per rank; one group for all tables",
    "tables": "more cores per rank; fewer different keys per step",
    "exchanges": "larger batches per rank; not more ranks than cores",
    "copies": "fewer columns; more cores per rank",
    "messages": "an exchange in two stages, fewer ranks with more threads, larger batches",
    "network": "16 bits on the wire, fewer columns, more bandwidth per host",
}
_WORKLOAD = {
    "tables": (26, "tables, looked up in one group"),
    "batch": (8192, "samples per rank"),
    "dim": (16, "columns of a row"),
    "hotness": (1, "keys per sample and table"),
    "distinct": (1.0, "different keys of a rank's batch, as a part of its keys"),
    "slots": (1, "slot rows: 0 for SGD, 1 for Adagrad, 2 for LazyAdam"),
}
# Each differs from the first by what one or two constants cost; 1 and 2 ranks take all of them.
CALIBRATION = (
    Workload(tables=1, batch=256, dim=16),
    Workload(tables=26, batch=256, dim=16),
    Workload(tables=26, batch=4096, dim=16),
    Workload(tables=26, batch=4096, dim=64),
    Workload(tables=26, batch=4096, dim=16, distinct=0.25),
)


class Measured(NamedTuple):
    """A measured step: all `ranks` on one host, and its time in seconds."""

    workload: Workload
    ranks: int
    seconds: float


def calibrate(steps: Sequence[Measured], cores: int) -> Machine:
    """The constants >= 0 whose predictions have the least squares of relative errors.

    Args:
        steps: Measured steps, of one rank and of several.
        cores: Cores of the host.

    Returns:
        A machine with these constants, and the defaults of the network between hosts.

    Raises:
        ValueError: there are not steps of one rank and of several, or a time is not positive.
    """
    for step in steps:
        require(step.seconds > 0, "seconds", "positive", step.seconds)
    several = {step.ranks > 1 for step in steps}
    require(len(several) == 2, "steps", "steps of one rank and of several", sorted(several))
    names = [c for term in list(TERMS)[:4] for c in TERMS[term]]
    occurs = [counts(step.workload, cores, step.ranks) for step in steps]
    columns = [[c[name] / s.seconds for c, s in zip(occurs, steps, strict=True)] for name in names]
    products = [[_dot(a, b) for b in columns] for a in columns]
    wanted = [sum(a) for a in columns]
    found = [0.0] * len(names)
    for _ in range(20_000):  # coordinate descent: each constant in turn, others fixed
        for i, row in enumerate(products):
            rest = wanted[i] - _dot(row, found) + row[i] * found[i]
            found[i] = max(0.0, rest / row[i]) if row[i] else 0.0
    return Machine(cores, **dict(zip(names, found, strict=True)))


def measure(ranks: int, workloads: Sequence[Workload]) -> tuple[list[Measured], int]:
    """Measures steps on ranks of this host, in processes of their own.

    Args:
        ranks: Number of ranks that are started.
        workloads: What is measured, one after the other.

    Returns:
        One measured step per workload, and the number of cores.

    Raises:
        RuntimeError: the ranks have failed, with what they wrote last.
    """
    line = [sys.executable, "-m", "sok_like.run", "-np", str(check_integer("ranks", ranks))]
    line += ["-m", "benchmarks.predict.steps", json.dumps([vars(w) for w in workloads])]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{ranks} rank(s) could not be measured: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(workloads, told["seconds"], strict=True)
    return [Measured(workload, ranks, seconds) for workload, seconds in pairs], told["cores"]


def measured_machine() -> Machine:
    """The constants of this host, from steps of 1 and 2 ranks; RuntimeError if ranks fail."""
    one, cores = measure(1, CALIBRATION)
    two, _ = measure(2, CALIBRATION)
    return calibrate([*one, *two], cores)


def _dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def load_machine(path: str) -> Machine:
    """A machine from a JSON file, as `--measure` writes it; ValueError if constants are not its."""
    with open(path) as file:
        read = json.load(file)
    names = [field.name for field in dataclasses.fields(Machine)]
    fits = isinstance(read, Mapping) and set(read) == set(names)
    require(fits, "--machine", f"a JSON file with {', '.join(names)}", read, path)
    return Machine(**read)


def format_prediction(
    workload: Workload, machine: Machine, ranks: Sequence[int], ranks_per_host: int
) -> str:
    """One line per number of ranks: hosts, milliseconds in all and by term, the largest term."""
    rows = [["ranks", "hosts", "ms/step", *TERMS, "largest term"]]
    largest = []
    for number in ranks:
        time = predict(workload, machine, number, ranks_per_host)
        hosts = -(-number // ranks_per_host)
        cells = [f"{1e3 * seconds:.2f}" for seconds in (time.total, *time)]
        rows.append([f"{number:,}", f"{hosts:,}", *cells, time.largest])
        largest.append(time.largest)
    helps = [f"{term}: {HELPS[term]}" for term in dict.fromkeys(largest)]
    return "\n".join([*aligned(rows, left={len(rows[0]) - 1}), *helps])


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the docstring of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict",
        description="Predicts the time of a training step on any number of ranks.",
    )
    parser.add_argument("--machine", metavar="FILE", help="constants as JSON")
    parser.add_argument(
        "--measure", action="store_true", help="measures them on 1 and 2 ranks, writes --machine"
    )
    for name, (default, meaning) in _WORKLOAD.items():
        text = f"{meaning}; default {default}"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16, 128, 1024])
    parser.add_argument("--ranks-per-host", type=int, help="default: one per core")
    parser.add_argument("--cores", type=int, help="per host; default: of the measured host")
    parser.add_argument("--latency-us", type=float, help="between hosts, per message; default 20")
    parser.add_argument("--gbit", type=float, help="network of a host, Gbit/s; default 25")
    args = parser.parse_args(argv)
    try:
        workload = Workload(**{name: getattr(args, name) for name in _WORKLOAD})
        machine = _machine(args)
        together = machine.cores if args.ranks_per_host is None else args.ranks_per_host
        print(format_prediction(workload, machine, args.ranks, together))
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"benchmarks.predict: {error}") from None


def _machine(args):
    if not args.machine and not args.measure:
        raise ValueError("--machine FILE or --measure is required. Received: neither")
    if args.measure:
        folder = os.path.dirname(args.machine or "") or "."
        require(os.path.isdir(folder), "--machine", "in a folder that exists", args.machine)
        machine = measured_machine()
        if args.machine:
            with open(args.machine, "w") as file:
                json.dump(vars(machine), file, indent=1)
    else:
        machine = load_machine(args.machine)
    changed = {"cores": args.cores}
    if args.latency_us is not None:
        changed["message"] = args.latency_us * 1e-6
    if args.gbit is not None:
        require(args.gbit > 0, "--gbit", "positive", args.gbit)
        changed["network"] = 8e-9 / args.gbit
    return dataclasses.replace(machine, **{k: v for k, v in changed.items() if v is not None})


if __name__ == "__main__":
    main()
