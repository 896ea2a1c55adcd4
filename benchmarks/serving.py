"""A table of 10 million keys, served: our SavedModel, DenseHashTable's, and this package's own op.

    python -m benchmarks.serving [--keys 10M] [--threads N] [--json FILE]

A process that has only TensorFlow loads each SavedModel. It reports the time from the call of
`tf.saved_model.load` to the first answer, the growth of its resident memory per key, and lookups
per second for batches of present keys in random order. DenseHashTable cannot hold two reserved
keys, and uses integers as their own hash. So it is also asked for ids of fields, `id + (field <<
40)`, but only for a few: with many it does not end.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.harness import machine, progress_line
from benchmarks.scale import _resident, parse_count

DIM = 16
CONTENDERS = ("float32", "DenseHashTable", "bfloat16", "int8")
BATCHES = (1_000, 100_000)
ROUNDS = 15
CHUNK = 2**20
FIELD_KEYS = 20_000


def make_keys(kind: str, num_keys: int) -> np.ndarray:
    """int64 `[num_keys]`, each once."""
    if kind == "fields":
        return (np.arange(num_keys) % 26 << 40) + np.arange(num_keys) // 26 + 1
    # Multiples of an odd number are a bijection on 64 bits: no key repeats, and 0 and -1 stay free.
    numbers = np.arange(1, num_keys + 1, dtype=np.uint64)
    return (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def rows_of(keys: np.ndarray) -> np.ndarray:
    """float32 `[num_keys, DIM]`, a function of the key, so that a check can repeat it."""
    first = (keys % 1009).astype(np.float32)[:, np.newaxis]
    return first + np.arange(DIM, dtype=np.float32)


def table_of(keys: np.ndarray) -> Any:
    """A tf.Module that looks up a table of these keys."""
    import tensorflow as tf

    import sok_like as sok

    class Ours(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = sok.EmbeddingVariable(DIM, name="served", initial_capacity=len(keys))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
        def __call__(self, keys):
            return {"rows": tf.gather(self.table, keys)}

    sok.Init(global_batch_size=1, seed=0)
    module = Ours()
    for at in range(0, len(keys), CHUNK):
        sok.assign(module.table, keys[at : at + CHUNK], rows_of(keys[at : at + CHUNK]))
    return module


def export(contender: str, kind: str, num_keys: int, path: str) -> dict[str, Any]:
    """Writes the SavedModel; for this package it also measures the package's own op."""
    import tensorflow as tf

    spec = tf.TensorSpec([None], tf.int64, "keys")
    keys = make_keys(kind, num_keys)
    found: dict[str, Any] = {}

    class Dense(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = tf.lookup.experimental.DenseHashTable(
                tf.int64,
                tf.float32,
                default_value=tf.zeros([DIM]),
                empty_key=tf.constant(0, tf.int64),
                deleted_key=tf.constant(-1, tf.int64),
                initial_num_buckets=1 << int(np.ceil(np.log2(num_keys * 1.3))),
            )
            # TensorFlow cannot put its tensors of these into a SavedModel's graph.
            for name in ("_default_value", "_empty_key", "_deleted_key"):
                setattr(self.table, name, getattr(self.table, name).numpy())

        @tf.function(input_signature=[spec])
        def __call__(self, keys):
            return {"rows": self.table.lookup(keys)}

    start = time.perf_counter()
    if contender == "DenseHashTable":
        module: Any = Dense()
        keys = keys[(keys != 0) & (keys != -1)]
        for at in range(0, len(keys), CHUNK):
            module.table.insert(keys[at : at + CHUNK], rows_of(keys[at : at + CHUNK]))
        found["fill s"] = time.perf_counter() - start
        start = time.perf_counter()
        tf.saved_model.save(module, path, {"serving_default": module.__call__})
        found["export s"] = time.perf_counter() - start
    else:
        import sok_like as sok

        module = table_of(keys)
        found["fill s"] = time.perf_counter() - start
        start = time.perf_counter()
        sok.export_saved_model(module, path, missing="zeros", row_dtype=contender)
        find = tf.function(
            lambda keys: {"rows": module.table.find(keys)[0]}, input_signature=[spec]
        )
        found["own op lookups/s"] = _lookups(find, keys)
    found["export s"] = time.perf_counter() - start
    files = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
    found["file bytes/key"] = sum(file.stat().st_size for file in files) / len(keys)
    return found


def serve(kind: str, num_keys: int, path: str) -> dict[str, Any]:
    """Loads a SavedModel in this process, which does not load the package, and reads rows."""
    import tensorflow as tf

    tf.constant(0) + 1
    before, start = _resident(), time.perf_counter()
    function = tf.saved_model.load(path).signatures["serving_default"]
    keys = make_keys(kind, num_keys)
    first = keys[:100]
    rows = function(tf.constant(first))["rows"].numpy()
    loaded = time.perf_counter() - start
    np.testing.assert_allclose(rows, rows_of(first), rtol=1e-2, atol=8)
    return {
        "load s": loaded,
        "resident bytes/key": (_resident() - before - keys.nbytes) / num_keys,
        "lookups/s": _lookups(function, keys),
    }


def _lookups(function, keys):
    """Lookups per second by batch size, median over rounds."""
    import tensorflow as tf

    random, rates = np.random.default_rng(1), {}
    for size in BATCHES:
        times = []
        for _ in range(ROUNDS):
            batch = tf.constant(random.choice(keys, size))
            start = time.perf_counter()
            function(batch)["rows"].numpy()
            times.append(time.perf_counter() - start)
        rates[size] = size / statistics.median(times)
    return rates


def _child(task, *arguments):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "benchmarks.serving", "--child", task, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(contender: str, kind: str, num_keys: int) -> dict[str, Any]:
    """One row of the result table."""
    with tempfile.TemporaryDirectory() as folder:
        found = _child("export", contender, kind, num_keys, folder)
        found |= _child("serve", kind, num_keys, folder)
    return {"contender": contender, "keys": f"{num_keys:,} {kind}", **found}


def text_table(results: list[dict[str, Any]]) -> str:
    small, large = (str(size) for size in BATCHES)
    lines = [
        f"| contender | keys | load s | resident bytes/key | file bytes/key | lookups/s, batch "
        f"{small} | batch {large} | export s |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line(name, r, rates):
        values = [
            *(f"{r[k]:.1f}" if k in r else "-" for k in ("load s", "resident bytes/key")),
            f"{r['file bytes/key']:.1f}" if "file bytes/key" in r else "-",
            *(f"{rates[size] / 1e6:.2f}M" for size in (small, large)),
            f"{r['export s']:.1f}" if "export s" in r else "-",
        ]
        return f"| {name} | {r['keys']} | " + " | ".join(values) + " |"

    for r in results:
        lines.append(line(r["contender"], r, r["lookups/s"]))
        if "own op lookups/s" in r and r["contender"] == "float32":
            lines.append(line("own op", {"keys": r["keys"]}, r["own op lookups/s"]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs all contenders, or the task of a child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--keys", type=parse_count, default=10_000_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="write what was measured to this file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        task, *rest = arguments.child
        call = {"export": lambda c, k, n, p: export(c, k, int(n), p),
                "serve": lambda k, n, p: serve(k, int(n), p)}[task]  # fmt: skip
        print(json.dumps(call(*rest)))
        return 0
    results = []
    everything = [(contender, "random", arguments.keys) for contender in CONTENDERS]
    for contender, kind, num_keys in [
        *everything,
        *((contender, "fields", FIELD_KEYS) for contender in CONTENDERS[:2]),
    ]:
        progress_line(f"{contender}, {num_keys:,} {kind} keys")
        results.append(measure(contender, kind, num_keys))
        print(json.dumps(results[-1]), file=sys.stderr)
    print(text_table(results))
    if arguments.json:
        content = {"machine": machine(arguments.threads), "results": results}
        pathlib.Path(arguments.json).write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
