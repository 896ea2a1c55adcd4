"""A served table of 10 million keys that follows the training: how soon, and what it costs readers.

    python -m benchmarks.following [--keys 10M] [--rounds 10] [--refreshes 40] [--json FILE]

One process trains and exports. This one has only TensorFlow: it serves, and looks for deltas every
10 ms while a thread asks for batches of 1,000 keys. In each round 1 % of the rows change. Reported:

    to a new answer   from the call of `sok.export_delta` to the first answer with a new row
    refresh           the call of the signature `refresh`

Then the deltas of further rounds are written, and copied one after the other while the trainer
waits, with pauses between. Of all these together, as parts of the rate of answers in the pauses:

    readers           the rate during `refresh`
    readers beside other work
                      the rate while a thread computes for as long as a refresh: what any work costs

and lookups per second without refreshes, of this SavedModel and of one that cannot be refreshed.
"""

from __future__ import annotations

import argparse
import hashlib
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
PAUSE = 0.3  # seconds


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


class Readers(threading.Thread):
    """A thread that asks for batches, each with the key whose row every delta changes."""

    def __init__(self, serve: Any, keys: np.ndarray):
        super().__init__()
        self._serve, self._keys, self._done = serve, keys, threading.Event()
        self.answers: list[tuple[float, float]] = []  # begins and ends
        self.first_new: list[float] = []  # when each delta's row was first read

    def run(self):
        random, row_at_first = np.random.default_rng(2), rows_of(self._keys[:1])[0, 0]
        while not self._done.is_set():
            batch = self._keys[random.integers(0, len(self._keys), BATCH)]
            batch[0] = self._keys[0]
            begin = time.time()
            row = self._serve(batch)["rows"][0].numpy()
            self.answers.append((begin, time.time()))
            if row_at_first - row[0] > len(self.first_new):
                self.first_new.append(self.answers[-1][1])

    def stop(self):
        self._done.set()
        self.join()

    def rate(self, windows: list[tuple[float, float]]) -> float:
        """Answers per second in all windows together; of an answer partly in one, that part."""
        begins, ends = np.array(self.answers).T
        answers = 0.0
        for begin, end in windows:
            inside = np.minimum(ends, end) - np.maximum(begins, begin)
            answers += float((np.maximum(inside, 0) / (ends - begins)).sum())
        return answers / sum(end - begin for begin, end in windows)


class Trainer:
    """The other process."""

    def __init__(self, num_keys: int, folder: str):
        command = [sys.executable, "-m", "benchmarks.following", "--child", str(num_keys), folder]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.exported = self.answer()

    def begin_delta(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        return json.loads(self._process.stdout.readline())

    def stop(self):
        self._process.stdin.close()
        self._process.wait()


def follow(num_keys: int, rounds: int, refreshes: int, folder: str) -> dict[str, Any]:
    """The process that serves."""
    import tensorflow as tf

    trainer = Trainer(num_keys, folder)
    found: dict[str, Any] = {"export s": trainer.exported}
    keys = make_keys("random", num_keys)
    plain = tf.saved_model.load(f"{folder}/plain").signatures["serving_default"]
    signatures = tf.saved_model.load(f"{folder}/follows").signatures
    serve, refresh = signatures["serving_default"], signatures["refresh"]
    found["lookups/s"] = {"plain": [], "follows": []}
    for _ in range(3):  # by turns
        found["lookups/s"]["plain"].append(_lookups(plain, keys))
        found["lookups/s"]["follows"].append(_lookups(serve, keys))
    del plain
    readers = Readers(lambda batch: serve(tf.constant(batch)), keys)
    readers.start()

    def window(work):
        begin = time.time()
        work()
        return begin, time.time()

    def take(number):
        return window(lambda: refresh(delta=tf.constant(f"{number:06}")))

    taken: list[dict[str, float]] = []
    for number in range(1, rounds + 1):
        progress_line(f"round {number}")
        alone = window(lambda: time.sleep(1.5))
        trainer.begin_delta()
        while not os.path.exists(f"{folder}/follows.deltas/{number:06}.index"):
            time.sleep(POLL)
        told = trainer.answer()  # it is idle from now on
        begin, end = take(number)
        while len(readers.first_new) < number:
            time.sleep(POLL)
        exporting = readers.rate([(told["start"], end)])
        taken.append(
            {
                "to a new answer s": readers.first_new[-1] - told["start"],
                "export_delta s": told["s"],
                "refresh s": end - begin,
                "readers from export to answer": exporting / readers.rate([alone]),
            }
        )
    found |= {name: [each[name] for each in taken] for name in taken[0]}
    for number in range(rounds + 1, rounds + refreshes + 1):
        progress_line(f"delta {number}")
        trainer.begin_delta()
        trainer.answer()
    windows: dict[str, list[tuple[float, float]]] = {"pauses": [], "refresh": [], "work": []}
    for number in range(rounds + 1, rounds + refreshes + 1):
        progress_line(f"refresh {number}")
        windows["pauses"].append(window(lambda: time.sleep(PAUSE)))
        windows["refresh"].append(take(number))
        windows["pauses"].append(window(lambda: time.sleep(PAUSE)))
        begin, end = windows["refresh"][-1]
        windows["work"].append(window(lambda: _compute(end - begin)))  # noqa: B023
    readers.stop()
    trainer.stop()
    alone_rate = readers.rate(windows["pauses"])
    found["refresh alone s"] = [end - begin for begin, end in windows["refresh"]]
    found["answers/s in pauses"] = alone_rate
    found["readers"] = readers.rate(windows["refresh"]) / alone_rate
    found["readers beside other work"] = readers.rate(windows["work"]) / alone_rate
    return found


def _compute(seconds):
    """Keeps one core busy, without Python's lock."""
    end, block = time.time() + seconds, bytes(2**18)
    while time.time() < end:
        hashlib.sha256(block)


def main(argv: list[str] | None = None) -> int:
    """Measures, or is the child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--keys", type=parse_count, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--refreshes", type=int, default=40)
    parser.add_argument("--json", help="write what was measured to this file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        export(int(arguments.child[0]), arguments.child[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = follow(arguments.keys, arguments.rounds, arguments.refreshes, folder)
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
