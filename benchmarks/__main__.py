"""Workloads W1 to W4 and groups of tables, ours and each peer in turns; prints ratios.

See docs/benchmarks.md. Only groups take several ranks; rank 0 prints. `two-ranks` and `allocator`
start processes by themselves, and `growth` takes up to 7 GiB.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default="", help="run what has one of these in its name: 'w1', 'adam', 'w2,w4'"
    )
    parser.add_argument("--quick", action="store_true", help="small data: does it run at all")
    parser.add_argument("--rounds", type=int, default=0, help="rounds; by default as each needs")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="TF's intra-op threads")
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write the figures there as well"
    )
    return parser.parse_args(argv)


def suites() -> dict:
    """By name: (function that makes contenders and matches, rounds, calls per turn)."""
    from benchmarks import groups, served, steps, strings, tables

    return {
        "w1-forward": (steps.w1_forward, 21, 5),
        "w1-sgd": (lambda quick: steps.w1("SGD", quick), 21, 5),
        "w1-adagrad": (lambda quick: steps.w1("Adagrad", quick), 21, 5),
        "w1-adam": (lambda quick: steps.w1("Adam", quick), 11, 3),
        "w2-forward": (steps.w2_forward, 15, 3),
        "w2-adagrad": (lambda quick: steps.w2("Adagrad", quick), 15, 3),
        "w2-adam": (lambda quick: steps.w2("Adam", quick), 7, 3),
        "w3": (tables.w3, 9, 1),
        "w4": (tables.w4, 31, 9),
        "strings": (strings.strings, 31, 9),
        "groups-26": (lambda quick: groups.groups(26, 256, quick), 15, 5),
        "groups-300": (lambda quick: groups.groups(300, 256, quick), 9, 3),
        "groups-1-key": (lambda quick: groups.groups(1, 1, quick, most=1), 15, 50),
        "groups-26-keys": (lambda quick: groups.groups(26, 1, quick, most=1), 15, 20),
        "served": (served.served, 15, 20),
        "predict-row": (served.predict_row, 15, 20),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)

    import sok_like as sok
    from benchmarks import harness, ranks, scale
    from sok_like.runtime.ranks import comm

    sok.Init(global_batch_size=8192)
    if comm.current().rank > 0:
        sys.stdout = open(os.devnull, "w")  # the figures of all ranks are similar
    machine = harness.machine(args.threads)
    print("  ".join(f"{k}: {v}" for k, v in machine.items()), flush=True)
    wanted = [part for part in args.only.lower().split(",") if part]
    results: list[harness.Result] = []
    for name, (make, rounds, burst) in suites().items():
        if wanted and not any(part in name for part in wanted):
            continue
        harness.progress_line(f"{name}: data and tables")
        contenders, matches = make(args.quick)
        times = harness.interleave(
            contenders,
            rounds=args.rounds or (3 if args.quick else rounds),
            burst=burst,
            progress=lambda text, name=name: harness.progress_line(f"{name}: {text}"),
        )
        part = harness.judge(times, matches)
        results += part
        harness.progress_line("")
        for r in part:
            print(
                f"{r.name}: {r.ours} {r.ours_ms:.2f} ms, {r.peer} {r.peer_ms:.2f} ms, "
                f"ratio {r.ratio:.3f}",
                flush=True,
            )
        del contenders, matches
        gc.collect()
    of_jobs = (args.threads, args.rounds or (3 if args.quick else 15), args.quick)
    alone = {
        "two-ranks": lambda: ranks.contest(*of_jobs),
        "allocator": lambda: ranks.allocators(*of_jobs),
        "growth": lambda: scale.growth(args.quick),
    }
    for name, make in alone.items():
        if comm.current().world_size == 1 and any(part in name for part in wanted or [""]):
            results += make()
    harness.publish(results, machine, args.json)
    return 0  # a missed target is a figure to read, not a failure of the program


if __name__ == "__main__":
    sys.exit(main())
