"""Memory of a rank with sharded and with replicated tables; see `benchmarks/dmp.py`.

    python -m benchmarks.dmp_memory [--ranks 2] [--scale 0.2] [--only adagrad]

Each contender is launched by itself, as memory once used is not given back for the next. Figures
are of the rank that has most:

    variables   bytes of variables and slot variables, by their shapes
    growth      of the process, from before the tables are made until some steps were trained: the
                variables, the compiled step, and buffers of a step
    peak        the most that the process ever had, TensorFlow's libraries included
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import dmp

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 5
COLUMNS = ("variables", "growth", "peak")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dmp_memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.2, help="rows of the tables times this")
    parser.add_argument("--batch_size", type=int, default=4096, help="over all ranks together")
    parser.add_argument("--only", default="sgd,adagrad", help="optimizers, by commas")
    parser.add_argument("--quick", action="store_true", help="small data: does it run at all")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--alone", default="", help="of the launched: measure this contender")
    return parser.parse_args(argv)


def _status(field):
    """Bytes in a field of this process's status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def measure(args: argparse.Namespace) -> None:
    """Runs on each launched rank: rank 0 writes the figures of the rank with the most."""
    hvd = dmp.start(threads=0)
    import tensorflow as tf

    tf.reduce_sum(tf.ones([8]))  # makes TensorFlow create its devices
    config, scale, batches = dmp.make_batches(args, hvd.size())
    before = _status("VmRSS")
    trainer = dmp.Trainer(args.alone, args.only, config, scale, batches)
    for i in range(STEPS):
        trainer(i)
    figures = (trainer.variable_bytes(), _status("VmRSS") - before, _status("VmHWM"))
    most = hvd.allgather(tf.constant([figures], tf.int64)).numpy().max(axis=0).tolist()
    if hvd.rank() == 0:
        with open(args.json, "w") as file:
            json.dump(dict(zip(COLUMNS, most, strict=True)), file)


def launch(args: argparse.Namespace, rule: str, contender: str) -> dict[str, int]:
    """The figures of one contender, launched by itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        options = ["--only", rule, "--alone", contender, "--json", path]
        options += ["--scale", str(args.scale), "--batch_size", str(args.batch_size)]
        options += ["--quick"] * args.quick
        program = ["-m", "benchmarks.dmp_memory", *options]
        subprocess.run(
            [sys.executable, "-m", "sok_like.run", "-np", str(args.ranks), *program],
            check=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )
        with open(path) as file:
            return json.load(file)


def table(figures: dict[str, dict[str, dict[str, int]]]) -> str:
    """A Markdown table in MiB, each with its ratio to the peer's."""
    lines = [
        "| optimizer | contender | " + " | ".join(f"{c} MiB (of peer's)" for c in COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for rule, contenders in figures.items():
        for name, mine in contenders.items():
            cells = [
                f"{mine[c] / 2**20:,.0f} ({mine[c] / contenders[dmp.PEER][c]:.2f})" for c in COLUMNS
            ]
            lines.append(f"| {rule} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.alone:
        measure(args)
        return 0
    from benchmarks import harness

    figures: dict[str, dict[str, dict[str, int]]] = {}
    for rule in args.only.split(","):
        figures[rule] = {}
        for contender in dmp.CONTENDERS:
            harness.progress_line(f"memory: {rule}: {contender}")
            figures[rule][contender] = launch(args, rule, contender)
    harness.progress_line("")
    print(table(figures))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
