"""One global batch, of W1 or of groups: on one rank with two threads, on two ranks with one thread.

    parent --"layer"--> rank 0 of a job --broadcast--> its other ranks     a burst of steps
    parent <--"8.13"--- rank 0                                             its median in ms

Both jobs exist during the whole run and take turns. A signal stops the waiting job, because its
ranks poll and would take a core. The cores are the same, so two ranks can at best be as fast as
one.

    python -m benchmarks --only two-ranks
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

from benchmarks import harness

RULE = "Adagrad"
BURST, TARGET = 5, 1.25
# Number of tables, global batch, largest hotness.
GROUPS = {"300 tables": (300, 256, 4), "one key of 26 tables": (26, 2, 1)}


class Job:
    """Ranks that take a step on request.

    Args:
        num_ranks: Number of ranks; they share `num_threads` threads.
        num_threads: Number of TensorFlow's threads over all ranks.
        quick: Whether the data are small.
    """

    def __init__(self, num_ranks: int, num_threads: int, quick: bool):
        each = str(max(1, num_threads // num_ranks))
        line = [sys.executable, "-m", "sok_like.run", "-np", str(num_ranks)]
        line += ["-m", "benchmarks.ranks", each, "quick" if quick else "full"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)
        self._pids = [int(word) for word in self._answer("ready")]
        self._signal(signal.SIGSTOP)

    def burst(self, name: str) -> float:
        """Milliseconds per step of `name`, the median of a burst."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        (text,) = self._answer("took")
        self._signal(signal.SIGSTOP)
        return float(text)

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.communicate("\n")

    def _answer(self, what):
        for line in self._process.stdout:
            if line.startswith(what):
                return line.split()[1:]
        raise RuntimeError(f"a job of the benchmark has ended: {self._process.wait()}")

    def _signal(self, number):
        for pid in self._pids:
            os.kill(pid, number)


def rank_main(num_threads: int, quick: bool) -> None:
    """Runs as a rank: makes its contenders, then runs bursts that rank 0 reads from its input."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)

    import sok_like as sok
    from benchmarks import groups, steps, workloads
    from sok_like.runtime.ranks import comm

    sok.Init(global_batch_size=8192)
    ranks = comm.current()
    data = workloads.w1(quick)
    data = data._replace(
        keys=data.keys[:, ranks.rank :: ranks.world_size],
        positions=data.positions[:, ranks.rank :: ranks.world_size],
    )
    keys = [(tf.constant(k),) for k in data.keys]
    contenders = {"layer": steps.w1_layer(RULE, data, keys), **steps.w1_groups_of_ids(RULE, data)}
    for name, (num_tables, batch, most) in GROUPS.items():
        made, _ = groups.groups(num_tables, batch, quick, most, [groups.GROUP])
        contenders[name] = made[f"{groups.GROUP} (step)"]
    names, calls = list(contenders), dict.fromkeys(contenders, 0)

    def step(name):
        start = time.perf_counter()
        contenders[name].call(calls[name])
        calls[name] += 1
        return (time.perf_counter() - start) * 1e3

    for name in names:
        for _ in range(contenders[name].warm_up):
            step(name)
    pids = ranks.all_gather(tf.constant([os.getpid()]), "bench_pids")
    if ranks.rank == 0:
        print("ready", *pids.numpy(), flush=True)
    while True:
        told = -1
        if ranks.rank == 0:
            told = names.index(name) if (name := sys.stdin.readline().strip()) else -1
        told = int(ranks.broadcast(tf.constant(told), 0, "bench_turn"))
        if told < 0:
            return
        took = statistics.median(step(names[told]) for _ in range(BURST))
        if ranks.rank == 0:
            print("took", took, flush=True)


def contest(num_threads: int, rounds: int, quick: bool) -> list[harness.Result]:
    """Times both jobs in turns."""
    from benchmarks.steps import RAGGED, SPARSE

    one, two = "ours, one rank", "ours, two ranks"
    jobs = {name: Job(n, num_threads, quick) for n, name in ((1, one), (2, two))}
    results = []
    for name in ("layer", RAGGED, SPARSE, *GROUPS):
        times: dict[str, list[float]] = {job: [] for job in jobs}
        for r in range(rounds):
            harness.progress_line(f"{name}: round {r + 1}/{rounds}")
            for job in list(jobs)[:: 1 if r % 2 == 0 else -1]:
                times[job].append(jobs[job].burst(name))
        what, target = f"W1 step {RULE}, {name.removeprefix('ours, ')}", TARGET
        if name in GROUPS:  # one rank exchanges nothing, and here that is most of a step
            what, target = f"step {RULE}, {name}", None
        match = harness.Match(what, two, one, target)
        results += harness.judge(times, [match])
        harness.progress_line("")
    for job in jobs.values():
        job.end()
    return results


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2] == "quick")
