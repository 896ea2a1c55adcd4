"""Dumps and restores of a table, beside `cp` and `tf.train.Checkpoint` of the same bytes.

    make bench-saving                        ARGS="--keys 10M 60M --dim 16 --json FILE"

One process writes and reads, in the same run: a full dump, a delta of 1% of the keys, the restore
of both, `cp` of the dump's file (with fsync, as in a dump), and a checkpoint of a dense variable
with as many bytes. "peak" is the largest sampled increase of the process's memory; a restore builds
the new content beside the old. "cpu" is the processor time of all threads, which other programs of
the machine change less than the time. The last lines compare rates with the goals: in bytes per
second, and in bytes per second of processor time.

With --background: a table with Adagrad that is trained in batches like those of W1, all features in
one table. It is dumped while it stands still and then while training goes on, ROUNDS times: one
column each. The first dump beside training takes memory from the system. With --even a batch is
BATCH keys drawn evenly from all, so more rows must be copied before the dump has read them. "pause"
is the time of `begin_dump` and `finish`; "cpu of step beside" is that of the process, less that of
a stopped dump.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.harness import machine, progress_line
from benchmarks.scale import _Peak, _resident, parse_count

CHUNK = 2**19
BATCH = 2**16  # keys per step, with --even
NUM_BATCHES = 256  # batches, used in turn
ALONE = 100  # steps before a dump, and as many after it
ROUNDS = 6
# What is compared, with what, and the rate at least as a part of that one's.
GOALS = [("dump", "checkpoint, write", 1 / 2), ("restore", "checkpoint, read", 1 / 3)]


def filled(num_keys: int, dim: int) -> Any:
    import tensorflow as tf

    import sok_like as sok

    table = sok.EmbeddingVariable(dim, name=f"saved_{num_keys}", initial_capacity=num_keys)
    for begin in range(0, num_keys, CHUNK):
        keys = np.arange(begin, min(num_keys, begin + CHUNK))
        sok.assign(table, keys, tf.ones([len(keys), dim]))
    return table


def copied(source: pathlib.Path, target: pathlib.Path) -> None:
    """`cp` with a flush to the disk."""
    subprocess.run(["cp", source, target], check=True)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def touch(num_bytes: int) -> None:
    """Writes to so much memory and frees it, so that the next call finds it mapped.

    A virtual machine gets free memory from its host at the first touch, at 0.3 GB/s where this was
    seen, and gives it back a few seconds after it was freed. Else that would be what is measured.
    """
    np.ones(num_bytes, np.uint8)


def run(num_keys: int, dim: int, rounds: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """For each kind of save: seconds (minimum of the rounds), bytes and the largest peak."""
    import tensorflow as tf

    import sok_like as sok

    table, saver, chain = filled(num_keys, dim), sok.Saver(), folder / "chain"
    touched = np.random.default_rng(0).choice(num_keys, num_keys // 100, replace=False)
    checkpoint = tf.train.Checkpoint(dense=tf.Variable(tf.ones([num_keys, dim])))
    dense, dense_bytes = folder / "dense", num_keys * dim * 4
    found: dict[str, dict[str, Any]] = {}

    def measure(kind: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        touch(3 * dense_bytes)
        before, cpu, begin = _resident(), _processor_time(), time.perf_counter()
        with _Peak() as peak:
            call(*arguments, **keywords)
        seconds, known = time.perf_counter() - begin, found.setdefault(kind, {"kind": kind})
        cpu = _processor_time() - cpu
        known["seconds"] = min(known.get("seconds", seconds), seconds)
        known["cpu"] = min(known.get("cpu", cpu), cpu)
        known["peak"] = max(known.get("peak", 0), peak.bytes - before)
        progress_line(f"{kind}: {seconds:.2f} s")

    for _ in range(rounds):
        measure("dump", saver.dump, table, chain)
        (base,) = chain.glob("*.npz")
        full = _bytes(chain)
        sok.assign(table, touched, tf.zeros([len(touched), dim]))
        measure("delta of 1 %", saver.dump, table, chain, since="last")
        measure("restore", saver.restore, table, chain)
        measure("cp", copied, base, folder / "copy")
        measure("checkpoint, write", checkpoint.write, str(dense))
        measure("checkpoint, read", checkpoint.read, str(dense))
    for kind, result in found.items():
        result["bytes"] = full
        if kind.startswith("checkpoint"):
            result["bytes"] = sum(_bytes(path) for path in folder.glob("dense.data*"))
    found["delta of 1 %"]["bytes"] = _bytes(chain) - full
    return list(found.values())


def batches(num_keys: int, even: bool) -> np.ndarray:
    """Keys `[NUM_BATCHES, keys per step]`: of W1 26 x 8,192, by Zipf's law within each feature."""
    random = np.random.default_rng(0)
    if even:
        return random.integers(0, num_keys, (NUM_BATCHES, BATCH))
    features, batch = 26, 8192
    drawn = workloads.zipf(
        random, workloads.ZIPF_EXPONENT, num_keys // features, (NUM_BATCHES, batch, features)
    )
    order = random.permutation(num_keys)  # frequent keys are not neighbours in the table either
    return order[drawn * features + np.arange(features)].reshape(NUM_BATCHES, -1)


def run_background(
    num_keys: int, dim: int, rounds: int, folder: pathlib.Path, even: bool
) -> list[dict[str, float]]:
    """Seconds of a stopped dump, of the pauses of each beside training, and of the steps."""
    import tensorflow as tf

    import sok_like as sok

    table, saver = filled(num_keys, dim), sok.Saver()
    in_turn = itertools.cycle(batches(num_keys, even))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.01))

    def step() -> float:
        keys = tf.constant(next(in_turn))
        begin = time.perf_counter()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, keys))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return time.perf_counter() - begin

    def seconds(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    for _ in range(20):
        step()
    stopped = min(seconds(lambda: saver.dump(table, folder)) for _ in range(2))
    cpu = _processor_time()
    saver.dump(table, folder)
    cpu_of_dump, before = _processor_time() - cpu, _resident()

    def steps_alone() -> tuple[list[float], float]:
        cpu = _processor_time()
        with _Peak():  # its thread takes time, too
            taken = [step() for _ in range(ALONE)]
        return taken, _processor_time() - cpu

    def background() -> dict[str, float]:
        alone, cpu_alone = steps_alone()
        cpu, began, beside = _processor_time(), time.perf_counter(), []
        with _Peak() as peak:
            dump = saver.begin_dump(table, folder)
            begin = time.perf_counter() - began
            while not dump.done:
                beside.append(step())
            written = time.perf_counter() - began
            cpu = _processor_time() - cpu - cpu_of_dump
            finish = seconds(dump.finish)
        after, cpu_after = steps_alone()
        alone, cpu_alone = alone + after, cpu_alone + cpu_after
        return {
            **{"stopped": stopped, "begin": begin, "written": written, "finish": finish},
            **{"pause / stopped": (begin + finish) / stopped, "peak_bytes": peak.bytes - before},
            **{"step": float(np.mean(alone)), "step beside": float(np.mean(beside))},
            **{"longest step": max(alone), "longest beside": max(beside), "steps": len(beside)},
            **{"cpu of step": cpu_alone / len(alone), "cpu of step beside": cpu / len(beside)},
            "beside / alone": float(np.mean(beside) / np.mean(alone)),
        }

    return [background() for _ in range(rounds)]


def _processor_time() -> float:
    """Seconds of this process and of programs that it has called."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def ratios(results: list[dict[str, Any]], field: str) -> dict[str, float]:
    """The rates that have a goal, each as a part of the rate it is compared with."""
    rate = {result["kind"]: result["bytes"] / result[field] for result in results}
    return {f"{kind} / {other}": rate[kind] / rate[other] for kind, other, _ in GOALS}


def _bytes(path):
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=parse_count, nargs="+", default=[parse_count("10M")])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; a temporary folder")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--background", action="store_true", help="beside training only")
    parser.add_argument("--even", action="store_true", help="with --background: keys drawn evenly")
    options = parser.parse_args()
    import sok_like as sok

    sok.Init(global_batch_size=1, seed=7)
    here, by_size = machine(os.cpu_count() or 1), {}
    for num_keys in options.keys:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            if options.background:
                found = run_background(
                    num_keys, options.dim, options.rounds, pathlib.Path(folder), options.even
                )
                print(f"{num_keys:,} keys, dim {options.dim}; {here['processor']}, {here['date']}")
                for name in found[0]:
                    print(f"{name:18}", *(f"{each[name]:12.4g}" for each in found))
                continue
            results = run(num_keys, options.dim, options.rounds, pathlib.Path(folder))
        by_size[num_keys] = results
        print(f"{num_keys:,} keys, dim {options.dim}; {here['processor']}, {here['date']}")
        for result in results:
            rate, peak = result["bytes"] / result["seconds"] / 1e9, result["peak"] / 2**20
            print(
                f"{result['kind']:18} {result['seconds']:8.2f} s   cpu {result['cpu']:7.2f} s "
                f"{result['bytes'] / 1e6:10.1f} MB {rate:7.2f} GB/s   peak {peak:7.0f} MiB"
            )
        by_cpu = ratios(results, "cpu")
        for (name, ratio), (*_, goal) in zip(
            ratios(results, "seconds").items(), GOALS, strict=True
        ):
            print(f"{name:30} {ratio:5.2f}, by cpu {by_cpu[name]:5.2f}   goal: {goal:.2f}")
    if options.background:
        return
    first, last = by_size[options.keys[0]], by_size[options.keys[-1]]
    for one, other in zip(first, last, strict=True) if len(options.keys) > 1 else ():
        if one["kind"] in ("dump", "restore"):
            rates = [each["bytes"] / each["seconds"] for each in (one, other)]
            cpu = [each["bytes"] / each["cpu"] for each in (one, other)]
            print(
                f"{one['kind']}, {options.keys[-1]:,} / {options.keys[0]:,} keys: "
                f"{rates[1] / rates[0]:5.2f}, by cpu {cpu[1] / cpu[0]:5.2f}   goal: 1.00"
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "results": by_size}, indent=1))


if __name__ == "__main__":
    main()
