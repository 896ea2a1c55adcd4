"""A full table under admission, eviction, dumps and restores: does memory stay flat?

    make soak                     20 minutes on 2 ranks
    make soak ARGS="--minutes 2"

Each rank trains a table that always gets new keys. At intervals it evicts, dumps, restores the dump
and pops evicted rows. Once per second it reads its resident memory. At the end a line is fitted
through the second half of the readings. The program fails if a rank's memory grows by 1 MiB per
minute or more, or if the table's counts do not add up.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm

MOST_MIB_PER_MINUTE = 1.0
CAPACITY, DIM, BATCH = 20_000, 8, 4096
DUMP_EVERY = 500  # steps


def resident_mib() -> float:
    """Memory of this process in MiB, without swapped pages."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope(times: list[float], sizes: list[float]) -> float:
    """MiB per minute, fitted through the second half of the readings."""
    half = len(times) // 2
    return float(np.polyfit(np.array(times[half:]) / 60, sizes[half:], 1)[0])


def check_counts(counts) -> None:
    """Raises AssertionError if something was lost without being counted."""
    assert counts.seen == counts.found + counts.admitted + counts.refused, counts
    assert counts.size == counts.admitted + counts.written - counts.evicted - counts.erased, counts
    assert counts.evicted == counts.popped + counts.buffered + counts.dropped, counts
    assert counts.waiting <= CAPACITY, counts


class Soak:
    """A table, its optimizer with a learning rate that changes at every step, and its dumps."""

    def __init__(self, folder: str):
        option = sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(2),
            evict_option=[sok.ScoreEvict("lru"), sok.L2WeightEvict(1e-6)],
            evicted_buffer_size=100,
        )
        self.table = sok.EmbeddingVariable(DIM, name="soak", capacity=CAPACITY, ev_option=option)
        schedule = tf.keras.optimizers.schedules.InverseTimeDecay(0.01, 1000, 0.1)
        self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(schedule))
        self.optimizer.build([self.table])
        self.folder, self.saver = folder, sok.Saver()
        self.rng = np.random.default_rng(comm.current().rank)
        self.step = tf.function(self._step, input_signature=[tf.TensorSpec([None], tf.int64)])

    def _step(self, keys):
        with tf.GradientTape() as tape:
            (rows,) = sok.group_embedding_lookup([self.table], [keys], name="soak")
            loss = tf.reduce_mean((rows - 0.5) ** 2)
        gradients = tape.gradient(loss, [self.table])
        self.optimizer.apply_gradients(zip(gradients, [self.table], strict=True))

    def run(self, number: int) -> None:
        """Takes training step `number`, and does what is due after it."""
        # Half of the keys come repeatedly; the other half are new or come for the second time.
        known = self.rng.integers(0, CAPACITY, BATCH // 2)
        new = self.rng.integers(0, 4 * BATCH, BATCH // 2) + (number // 4) * BATCH + 2**40
        self.step(tf.constant(np.concatenate([known, new])))
        if number % DUMP_EVERY:
            return
        check_counts(self.table.statistics())
        self.table.evict()
        self.saver.dump_to_file(self.table, self.folder)
        if number % (4 * DUMP_EVERY) == 0:
            self.saver.restore_from_file(self.table, self.folder)
        self.table.pop_evicted()
        gc.collect()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args(arguments).minutes
    sok.Init(global_batch_size=2 * BATCH, seed=1)
    communicator = comm.current()
    folders = tempfile.TemporaryDirectory(prefix="sok_soak_") if communicator.rank == 0 else None
    name = np.frombuffer((folders.name if folders else "").encode(), np.uint8)
    name = communicator.all_gather(tf.constant(name), "soak_folder").numpy().tobytes().decode()
    soak, times, sizes = Soak(name), [], []
    start, number, go_on = time.monotonic(), 0, True
    while go_on:
        number += 1
        soak.run(number)
        now = time.monotonic() - start
        if not times or now > times[-1] + 1:
            times.append(now)
            sizes.append(resident_mib())
        if number % 100 == 0:  # ranks stop together
            done = tf.constant([int(now > 60 * minutes)], tf.int32)
            go_on = not communicator.all_gather(done, "soak_done").numpy().any()
    counts = soak.table.statistics()
    check_counts(counts)
    grown = slope(times, sizes)
    print(
        f"rank {communicator.rank}: {number} steps in {times[-1] / 60:.1f} minutes, "
        f"{counts.evicted} keys evicted, {counts.forgotten} forgotten while waiting, "
        f"{sizes[-1]:.0f} MiB resident, {grown:+.2f} MiB per minute",
        flush=True,
    )
    assert counts.evicted > 0, counts
    worst = communicator.all_gather(tf.constant([grown], tf.float64), "soak_slope").numpy().max()
    return 0 if worst < MOST_MIB_PER_MINUTE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
