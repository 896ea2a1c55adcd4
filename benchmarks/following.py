"""A served table of 10 million keys that follows the training: how soon, and what it costs readers.

    python -m benchmarks.following [--keys 10M] [--rounds 10] [--json FILE]

One process trains and exports. This one has only TensorFlow: it serves, and looks for deltas every
10 ms while a thread asks for batches of 1,000 keys. In each round 1 % of the rows change. Reported:

    to a new answer   from the call of `sok.export_delta` to the first answer with a new row
    refresh           the call of the signature `refresh`
    readers           the rate of answers during `refresh`, as a part of the rate in the second
                      before `export_delta`

and lookups per second without refreshes, of this SavedModel and of one that cannot be refreshed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from benchmarks.harness import machine, progress_line
from benchmarks.scale import parse_count
from benchmarks.serving import _lookups, make_keys, rows_of, table_of

BATCH = 1_000
CHANGED = 0.01
POLL = 0.01  # seconds


def export(num_keys: int, folder: str) -> None:
    """The process that trains: exports, then a delta for each line that it reads."""
    import sok_like as sok

    keys, told = make_keys("random", num_keys), {}
    module = table_of(keys)
    for name, refreshable in (("plain", False), ("follows", True)):
        start = time.perf_counter()
        sok.export_saved_model(module, f"{folder}/{name}", refreshable=refreshable)
        told[name] = time.perf_counter() - start
    print(json.dumps(told), flush=True)
    random = np.random.default_rng(0)
    for number, _ in enumerate(sys.stdin, 1):
        changed = random.choice(keys[1:], int(CHANGED * num_keys), replace=False)
        changed[0] = keys[0]  # the key that the server looks for
        sok.assign(module.table, changed, rows_of(changed) - number)
        start = time.time()
        sok.export_delta(module, f"{folder}/follows.deltas/{number:06}")
        print(json.dumps({"start": start, "s": time.time() - start}), flush=True)


def follow(num_keys: int, rounds: int, folder: str) -> dict[str, Any]:
    """The process that serves."""
    import tensorflow as tf

    command = [sys.executable, "-m", "benchmarks.following", "--child", str(num_keys), folder]
    trainer: Any = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = {"export s": json.loads(trainer.stdout.readline())}
    keys = make_keys("random", num_keys)
    plain = tf.saved_model.load(f"{folder}/plain").signatures["serving_default"]
    signatures = tf.saved_model.load(f"{folder}/follows").signatures
    serve, refresh = signatures["serving_default"], signatures["refresh"]
    found["lookups/s"] = {"plain": [], "follows": []}
    for _ in range(3):  # by turns
        found["lookups/s"]["plain"].append(_lookups(plain, keys))
        found["lookups/s"]["follows"].append(_lookups(serve, keys))
    del plain
    ends: list[float] = []  # of the readers' answers
    first_new: list[float] = []
    wanted, done = [0], threading.Event()

    def read():
        random = np.random.default_rng(2)
        while not done.is_set():
            batch = keys[random.integers(0, num_keys, BATCH)]
            batch[0] = keys[0]
            row = serve(tf.constant(batch))["rows"][0].numpy()
            ends.append(time.time())
            if len(first_new) < wanted[0] and row[0] == rows_of(keys[:1])[0, 0] - wanted[0]:
                first_new.append(ends[-1])

    reader = threading.Thread(target=read)
    reader.start()
    taken: list[dict[str, float]] = []
    for number in range(1, rounds + 1):
        progress_line(f"round {number}")
        time.sleep(1.5)
        wanted[0] = number
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        while not os.path.exists(f"{folder}/follows.deltas/{number:06}.index"):
            time.sleep(POLL)
        begin = time.time()
        refresh(delta=tf.constant(f"{number:06}"))
        end = time.time()
        told = json.loads(trainer.stdout.readline())
        while len(first_new) < number:
            time.sleep(POLL)
        start = told["start"]
        before = sum(start - 1 <= at < start for at in ends)
        during = sum(begin <= at < end for at in ends) / (end - begin)
        taken.append(
            {
                "to a new answer s": first_new[-1] - start,
                "export_delta s": told["s"],
                "refresh s": end - begin,
                "readers": during / before,
                "readers from export to answer": sum(start <= at < end for at in ends)
                / (end - start)
                / before,
            }
        )
    done.set()
    reader.join()
    trainer.stdin.close()
    trainer.wait()
    return {**found, **{name: [each[name] for each in taken] for name in taken[0]}}


def main(argv: list[str] | None = None) -> int:
    """Measures, or is the child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--keys", type=parse_count, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="write what was measured to this file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        export(int(arguments.child[0]), arguments.child[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = follow(arguments.keys, arguments.rounds, folder)
    for name, values in found.items():
        if isinstance(values, list):
            print(f"{name}: median {statistics.median(values):.3f}, all {np.round(values, 3)}")
        else:
            print(f"{name}: {values}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(os.cpu_count()), "results": found}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
