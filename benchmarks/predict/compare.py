"""Predicted and measured steps: constants from 1 and 2 ranks, then other steps of 1, 2 and 4 ranks.

    python -m benchmarks.predict.compare --machine out/machine.json   80 s

No step that is predicted has been used for the constants: batch sizes differ, and 4 ranks take no
part in the calibration. See docs/scaling.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time

from benchmarks.predict import __main__ as predict
from benchmarks.predict.model import TERMS, Workload

PREDICTED = [
    Workload(tables=tables, batch=batch, dim=dim)
    for tables in (1, 26)
    for dim in (16, 64)
    for batch in (1024, 8192)
]


def main() -> None:
    """Prints the tables of docs/scaling.md: predicted and measured steps, and more ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict.compare", description=__doc__
    )
    parser.add_argument("--machine", metavar="FILE", help="writes the constants there, as JSON")
    args = parser.parse_args()
    begun, load = time.monotonic(), os.getloadavg()
    workloads = sorted([*predict.CALIBRATION, *PREDICTED], key=lambda w: (w.tables, w.dim))
    known, checked = [], []
    for ranks in (1, 2, 4):
        steps, cores = predict.measure(ranks, workloads if ranks < 4 else PREDICTED)
        known += [step for step in steps if step.workload in predict.CALIBRATION]
        checked += [step for step in steps if step.workload in PREDICTED]
    machine = predict.calibrate(known, cores)
    if args.machine:
        with open(args.machine, "w") as file:
            json.dump(vars(machine), file, indent=1)
    print("| tables | batch per rank | dim | 1 rank | 2 ranks | 4 ranks |")
    print("|---|---|---|---|---|---|")
    errors = []
    for workload in PREDICTED:
        cells = [f"{workload.tables}", f"{workload.batch:,}", f"{workload.dim}"]
        for _, ranks, seconds in (step for step in checked if step.workload == workload):
            predicted = predict.predict(workload, machine, ranks).total
            errors.append(predicted / seconds - 1)
            cells.append(f"{1e3 * predicted:.2f} / {1e3 * seconds:.2f}")
        print(f"| {' | '.join(cells)} |")
    sizes = sorted(map(abs, errors))
    print(
        f"\nwithin 25 %: {sum(size <= 0.25 for size in sizes)} of {len(sizes)}, median error",
        end=" ",
    )
    print(f"{100 * statistics.median(sizes):.0f} %, largest {100 * sizes[-1]:.0f} %")
    print(f"load average before {load[0]:.1f}, {time.monotonic() - begun:.0f} s\n{machine}")
    hosts = dataclasses.replace(machine, cores=16)
    print(f"\n| batch per rank | ranks | a step | {' | '.join(TERMS)} |")
    print(f"|---|---|---|{'---|' * len(TERMS)}")
    for workload in [w for w in PREDICTED if w.tables > 1 and w.dim == 16]:
        for ranks in (16, 128, 1024):
            time_of_step = predict.predict(workload, hosts, ranks, 8)
            cells = [f"{1e3 * seconds:.1f}" for seconds in (time_of_step.total, *time_of_step)]
            print(f"| {workload.batch:,} | {ranks:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
