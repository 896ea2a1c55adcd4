"""Exchanges and steps by MPI and by Horovod, in turns: by the clock, and by processor time.

    make bench-engines

It prints Markdown. Jobs of both engines exist at the same time; see `benchmarks.ranks`. Sizes are
bytes that a rank gives, to an all-to-all for all ranks together. `idle` are ranks that do nothing
for a second, and `waiting` one of two that waits so long for the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time

from benchmarks import harness, ranks

MPI, HOROVOD = "MPI", "Horovod"
SIZES = {"8 B": 8, "64 KiB": 2**16, "1 MiB": 2**20, "13 MiB": 13 * 2**20}
EXCHANGES = [f"{what}, {size}" for size in SIZES for what in ("all-to-all", "sum")]
STEPS = {"26 tables, 1 key": 1, "26 tables, 1,024 keys": 1024}  # keys per rank and table
IDLE, WAITING, W1 = "idle, 1 s", "waiting, 1 s", "W1"
SECONDS = 0.15  # of a burst
TARGETS = {**dict.fromkeys(EXCHANGES, 1.1), "26 tables, 1 key": 0.8}  # by the clock
MOST_IDLE = 5.0  # ms of processor time per second and rank


def contenders(quick: bool) -> dict[str, harness.Contender]:
    """What a rank measures, by name."""
    import tensorflow as tf

    from benchmarks import groups, steps, workloads
    from sok_like.runtime.ranks import comm

    communicator = comm.current()
    world_size = communicator.world_size
    result = {}
    for size, num_bytes in SIZES.items():
        result[f"all-to-all, {size}"] = _exchange(communicator, num_bytes)
        result[f"sum, {size}"] = _sum(communicator, num_bytes)
    if world_size > 2:
        return result
    for name, batch in STEPS.items():
        made, _ = groups.groups(26, batch * world_size, quick, 1, [groups.GROUP])
        result[name] = made[f"{groups.GROUP} (step)"]
    data = workloads.w1(quick)
    mine = data.keys[:, communicator.rank :: world_size]
    result[W1] = steps.w1_layer("Adagrad", data, [(tf.constant(keys),) for keys in mine])

    def wait(_):
        if communicator.rank == world_size - 1:
            time.sleep(1.0)
        communicator.barrier()

    result[IDLE] = harness.Contender(lambda i: time.sleep(1.0), warm_up=0)
    result[WAITING] = harness.Contender(wait, warm_up=0)
    return result


def _exchange(communicator, num_bytes):
    import tensorflow as tf

    world_size = communicator.world_size
    part = num_bytes // world_size
    splits = tf.fill([world_size], part)

    @tf.function
    def exchange(tensor):
        return communicator.all_to_all(tensor, splits, f"bench_exchange_{num_bytes}")

    tensor = tf.zeros([part * world_size], tf.uint8)
    return harness.Contender(lambda i: exchange(tensor))


def _sum(communicator, num_bytes):
    import tensorflow as tf

    @tf.function
    def add(tensor):
        return communicator.sum(tensor, f"bench_sum_{num_bytes}")

    tensor = tf.zeros([num_bytes // 4])
    return harness.Contender(lambda i: add(tensor))


def contest(num_ranks: int, rounds: int, quick: bool) -> list[list[harness.Result]]:
    """The results of both engines on so many ranks: by the clock, and by processor time."""
    words = ["-m", "benchmarks.engines", "--rank", *["--quick"] * quick]
    jobs = {
        engine: ranks.Job(num_ranks, words, {"SOK_ENGINE": engine.lower()})
        for engine in (MPI, HOROVOD)
    }
    results = []
    for name in [*EXCHANGES, *([*STEPS, W1, IDLE, WAITING] if num_ranks == 2 else [])]:
        # Also takes the page faults of a first call out of the figures.
        first = max(job.burst(name, 1)[0] for job in jobs.values())
        calls = max(1 if first > 500 else 3, min(100, int(SECONDS * 1e3 / first)))
        turns = rounds if first < 500 else 3
        clock: dict[str, list[float]] = {engine: [] for engine in jobs}
        processors: dict[str, list[float]] = {engine: [] for engine in jobs}
        for r in range(turns):
            harness.progress_line(f"{num_ranks} ranks, {name}: round {r + 1}/{turns}")
            for engine in list(jobs)[:: 1 if r % 2 == 0 else -1]:
                elapsed, used = jobs[engine].burst(name, calls)
                clock[engine].append(elapsed)
                processors[engine].append(used / num_ranks)
        harness.progress_line("")
        match = harness.Match(name, MPI, HOROVOD, TARGETS.get(name))
        results.append(harness.judge(clock, [match]) + harness.judge(processors, [match]))
        print(_row(num_ranks, *results[-1]), flush=True)
    for job in jobs.values():
        job.end()
    return results


def _row(num_ranks, clock, processors):
    missed, limit = clock.met is False, "" if clock.target is None else f"{clock.target:g}"
    cells = [f"{clock.ours_ms:.2f}", f"{clock.peer_ms:.2f}"]
    cells += [f"{clock.ratio:.2f} ({clock.ratio_low:.2f}-{clock.ratio_high:.2f})"]
    if clock.name in (IDLE, WAITING):
        cells = ["", "", ""]
    if clock.name == IDLE:
        missed, limit = processors.ours_ms > MOST_IDLE, f"{MOST_IDLE:g} ms"
    cells += [f"{processors.ours_ms:.2f}", f"{processors.peer_ms:.2f}", f"{processors.ratio:.2f}"]
    limit = f"**{limit}, missed**" if missed else limit
    return f"| {num_ranks} | {clock.name} | {' | '.join(cells)} | {limit} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables: does it run at all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        return ranks.serve(1, lambda: contenders(args.quick))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    machine = harness.machine(1)
    print("  ".join(f"{k}: {v}" for k, v in machine.items()), flush=True)
    print(
        f"\n| ranks | what | {MPI}, ms | {HOROVOD}, ms | ratio | {MPI}, processor ms per rank "
        f"| {HOROVOD} | ratio | target |\n|---|---|---|---|---|---|---|---|---|"
    )
    results = {n: contest(n, args.rounds, args.quick) for n in args.ranks}
    if args.json:
        figures = {
            n: [[dataclasses.asdict(result) for result in pair] for pair in pairs]
            for n, pairs in results.items()
        }
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "results": figures}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
