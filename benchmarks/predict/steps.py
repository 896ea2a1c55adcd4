"""Measures training steps for `benchmarks.predict`, which starts it on one or two ranks:

    python -m sok_like.run -np 2 -m benchmarks.predict.steps '[{"tables": 26, ...}]'

Rank 0 prints one JSON object: `seconds` per workload, and the number of `cores`. A time is the
least of many bursts of steps: other programs take the cores in some bursts, not in all. The tables
have 2 million rows per kind of workload.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from benchmarks.predict.model import Workload
from sok_like.lookup import hash_lookup
from sok_like.optimizers import LazyAdam
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime.checks import require
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.variable import EmbeddingVariable

_NUM_ROWS = 2_000_000  # of all tables of a workload: more than caches hold
_BATCHES, _BURST, _ROUNDS, _SECONDS = 64, 3, 4, 0.25
_ODD = 0x9E3779B97F4A7C1  # makes keys that are not neighbours
_OPTIMIZERS = (  # by the number of slot rows
    lambda: OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.01)),
    lambda: OptimizerWrapper(tf.compat.v1.train.AdagradOptimizer(0.01)),
    lambda: LazyAdam(0.01),
)


class Tables:
    """Tables of a workload, which hold all keys, and their training step."""

    def __init__(self, workload: Workload):
        fits = workload.slots < len(_OPTIMIZERS)
        require(fits, "slots", "0, 1 or 2 in a measured workload", workload.slots)
        ranks, number = comm.current(), workload.tables
        self.num_rows = _NUM_ROWS // number
        self._name = f"step_times_{number}_{workload.dim}_{workload.slots}"
        self.tables = [
            EmbeddingVariable(workload.dim, name=f"{self._name}_{i}") for i in range(number)
        ]
        optimizer = _OPTIMIZERS[workload.slots]()
        if hasattr(optimizer, "build"):
            optimizer.build(self.tables)

        @tf.function(reduce_retracing=True)
        def step(keys, row_splits):
            with tf.GradientTape() as tape:
                rows = self._lookup(keys, row_splits)
            ones = [tf.ones_like(each) for each in rows]
            gradients = tape.gradient(rows, self.tables, output_gradients=ones)
            optimizer.apply_gradients(zip(gradients, self.tables, strict=True))

        self.step = step  # of int64 keys `[tables, num_keys]` and their row splits
        parts = np.array_split(np.arange(self.num_rows), 8 * ranks.world_size)
        for part in parts[ranks.rank :: ranks.world_size]:
            keys = tf.constant(np.tile(part * _ODD, [number, 1]))
            step(keys, tf.range(len(part) + 1, dtype=tf.int64))

    def _lookup(self, keys, row_splits):
        each = zip(self.tables, tf.unstack(keys, num=len(self.tables)), strict=True)
        features = [hash_lookup.HashFeature(t, k, "sum", row_splits) for t, k in each]
        return hash_lookup.lookup(features, training=True, gradient_scale="sum", name=self._name)


def batches(workload: Workload, num_rows: int, rank: int) -> Iterator[tf.Tensor]:
    """Int64 keys `[tables, batch * hotness]`, `table_keys` different ones in each table.

    No key is in two batches, so that rows come from memory and not from a cache.
    """
    rng = np.random.default_rng([rank, workload.tables, workload.batch, workload.dim])
    num_keys, different = workload.batch * workload.hotness, workload.table_keys
    most = f"at most {num_rows:,} in a measured table"
    require(different <= num_rows, "table_keys", most, different)
    rows = [rng.permutation(num_rows) for _ in range(workload.tables)]
    for i in range(min(_BATCHES, num_rows // different)):
        found = [r[i * different : (i + 1) * different] for r in rows]
        keys = [rng.permutation(np.resize(f, num_keys)) for f in found]
        yield tf.constant(np.stack(keys) * _ODD)


class _Steps:
    """Bursts of training steps of a workload."""

    def __init__(self, workload, tables):
        self._tables, self._ranks = tables, comm.current()
        self._keys = list(batches(workload, tables.num_rows, self._ranks.rank))
        num_keys = workload.batch * workload.hotness
        self._row_splits = tf.range(0, num_keys + 1, workload.hotness, tf.int64)
        self._begun = 0
        self._burst(_BURST)
        each = tf.constant(self._burst(_BURST))
        each = float(self._ranks.broadcast(each, 0, "step_times_burst"))  # all make as many
        self._bursts = max(2, int(_SECONDS / _BURST / each))

    def _burst(self, length):
        self._ranks.barrier()
        start = time.perf_counter()
        for _ in range(length):
            self._tables.step(self._keys[self._begun % len(self._keys)], self._row_splits)
            self._begun += 1
        return (time.perf_counter() - start) / length

    def least(self):
        """Seconds of a step in the burst that took least."""
        return min(self._burst(_BURST) for _ in range(self._bursts))


def main(text: str) -> None:
    """Measures the workloads in a JSON list of objects with the fields of `Workload`."""
    workloads = [Workload(**fields) for fields in json.loads(text)]
    ensure_initialized(7)
    tables: dict[tuple, Tables] = {}
    steps = []
    for workload in workloads:
        alike = (workload.tables, workload.dim, workload.slots)
        tables[alike] = tables.get(alike) or Tables(workload)
        steps.append(_Steps(workload, tables[alike]))
    # In rounds, because another program may disturb all bursts of a second.
    seconds = np.min([[each.least() for each in steps] for _ in range(_ROUNDS)], axis=0).tolist()
    if comm.current().rank == 0:
        cores = len(os.sched_getaffinity(0))
        print(json.dumps({"seconds": seconds, "cores": cores}))


if __name__ == "__main__":
    main(sys.argv[1])
