"""One global batch, of W1 or of groups: on one rank with two threads, on two ranks with one thread.

    parent --"layer 5"------> rank 0 of a job --broadcast--> its other ranks     a burst of 5 steps
    parent <--"8.13 15.9"---- rank 0               ms per step, and those of the ranks' processors

Both jobs exist during the whole run and take turns. A signal stops the waiting job, because its
ranks poll and would take a core. The cores are the same, so two ranks can at best be as fast as
one. `benchmarks.engines` lets jobs of other engines take turns in the same way.

    python -m benchmarks --only two-ranks

`allocators` compares jobs of one rank: one as a program is by default, the others with an allocator
preloaded.
"""

from __future__ import annotations

import ctypes.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks import harness

RULE = "Adagrad"
BURST, TARGET = 5, 1.25
PRELOADED, TARGET_OF_ALLOCATORS = ("tcmalloc_minimal", "jemalloc"), 1.1
# Number of tables, global batch, largest hotness.
GROUPS = {"300 tables": (300, 256, 4), "one key of 26 tables": (26, 2, 1)}


class Job:
    """Ranks that make a burst of calls on request.

    Args:
        num_ranks: Number of ranks.
        words: The program that calls `serve`, and its arguments.
        environment: Variables beside those of this process.
    """

    def __init__(
        self, num_ranks: int, words: Sequence[str], environment: Mapping[str, str] | None = None
    ):
        line = [sys.executable, "-m", "sok_like.run", "-np", str(num_ranks), *words]
        pipe, variables = subprocess.PIPE, {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=variables)
        self._pids = [int(word) for word in self._answer("ready")]
        self._signal(signal.SIGSTOP)

    def burst(self, name: str, calls: int) -> tuple[float, float]:
        """Milliseconds per call of `name`: by the clock, the median; by all ranks' processors."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{name},{calls}\n")
        self._process.stdin.flush()
        clock, processors = map(float, self._answer("took"))
        self._signal(signal.SIGSTOP)
        return clock, processors

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


def serve(num_threads: int, contenders: Callable[[], Mapping[str, harness.Contender]]) -> None:
    """Runs as a rank of a job: warms its contenders up, then runs bursts that rank 0 reads."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)

    import sok_like as sok
    from sok_like.runtime.ranks import comm

    sok.Init(global_batch_size=8192)
    ranks, by_name = comm.current(), contenders()
    names, calls = list(by_name), dict.fromkeys(by_name, 0)

    def milliseconds(name):
        start = time.perf_counter()
        by_name[name].call(calls[name])
        calls[name] += 1
        return (time.perf_counter() - start) * 1e3

    for name in names:
        for _ in range(by_name[name].warm_up):
            milliseconds(name)
    pids = ranks.all_gather(tf.constant([os.getpid()]), "bench_pids")
    if ranks.rank == 0:
        print("ready", *pids.numpy(), flush=True)
    while True:
        turn = [-1, 0]
        if ranks.rank == 0 and (line := sys.stdin.readline().strip()):
            name, _, number = line.rpartition(",")
            turn = [names.index(name), int(number)]
        place, burst = ranks.broadcast(tf.constant(turn), 0, "bench_turn").numpy()
        if place < 0:
            return
        before = time.process_time()
        times = [milliseconds(names[place]) for _ in range(burst)]
        used = tf.constant((time.process_time() - before) * 1e3 / burst)
        used = float(ranks.sum(used, "bench_processors"))
        if ranks.rank == 0:
            print("took", statistics.median(times), used, flush=True)


def _contenders(quick):
    import tensorflow as tf

    from benchmarks import groups, steps, workloads
    from sok_like.runtime.ranks import comm

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
    return contenders


def contest(num_threads: int, rounds: int, quick: bool) -> list[harness.Result]:
    """Times both jobs in turns."""
    from benchmarks.steps import RAGGED, SPARSE

    one, two = "ours, one rank", "ours, two ranks"
    words = ["-m", "benchmarks.ranks", "quick" if quick else "full"]
    jobs = {
        name: Job(n, [*words, str(max(1, num_threads // n))]) for n, name in ((1, one), (2, two))
    }
    results = []
    for name in ("layer", RAGGED, SPARSE, *GROUPS):
        times = _in_turns(jobs, name, rounds)
        what, target = f"W1 step {RULE}, {name.removeprefix('ours, ')}", TARGET
        if name in GROUPS:  # one rank exchanges nothing, and here that is most of a step
            what, target = f"step {RULE}, {name}", None
        match = harness.Match(what, two, one, target)
        results += harness.judge(times, [match])
    for job in jobs.values():
        job.end()
    return results


def allocators(num_threads: int, rounds: int, quick: bool) -> list[harness.Result]:
    """A step by default, against the same with each allocator that is installed.

    Without oneDNN's ops, where TensorFlow would have an allocator of its own.
    """
    from benchmarks.steps import OURS, RAGGED

    libraries = filter(None, map(ctypes.util.find_library, PRELOADED))
    preloaded = {f"the same with {library}": {"LD_PRELOAD": library} for library in libraries}
    if not preloaded:
        return []
    words = ["-m", "benchmarks.ranks", "quick" if quick else "full", str(num_threads)]
    jobs = {
        name: Job(1, words, {"TF_ENABLE_ONEDNN_OPTS": "0", **environment})
        for name, environment in {OURS: {}, **preloaded}.items()
    }
    results = []
    for name in ("layer", RAGGED):
        what = f"allocator, W1 step {RULE}, {name.removeprefix('ours, ')}"
        matches = [harness.Match(what, OURS, peer, TARGET_OF_ALLOCATORS) for peer in preloaded]
        results += harness.judge(_in_turns(jobs, name, rounds), matches)
    for job in jobs.values():
        job.end()
    return results


def _in_turns(jobs: Mapping[str, Job], name: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {job: [] for job in jobs}
    for r in range(rounds):
        harness.progress_line(f"{name}: round {r + 1}/{rounds}")
        for job in list(jobs)[:: 1 if r % 2 == 0 else -1]:
            times[job].append(jobs[job].burst(name, BURST)[0])
    harness.progress_line("")
    return times


if __name__ == "__main__":
    serve(int(sys.argv[2]), lambda: _contenders(sys.argv[1] == "quick"))
