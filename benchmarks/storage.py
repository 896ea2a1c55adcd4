"""Rows on disk against rows in memory: a training step of each in turns, and their ratio.

    python -m benchmarks.storage --path DIRECTORY_ON_A_DISK

The table on disk keeps a quarter of its rows in memory. "tables": lookup and update alone, which a
row in memory makes so short that every block that is read shows. "model": with dense layers of
1024, 512 and 256 units behind them, forward and backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

DIM, FEATURES = 16, 26
EXPONENT = 1.05


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--path", default="out/rows", help="a directory on a disk")
    parser.add_argument("--keys", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args(argv)


def tables(args):
    """One table in memory and one on disk, each with an optimizer."""
    import tensorflow as tf

    import sok_like as sok

    row_bytes = 2 * DIM * 4  # with Adagrad's accumulators
    storage = sok.StorageOption("DRAM_SSDHASH", args.path, [args.keys * row_bytes // 4])
    option = sok.EmbeddingVariableOption(storage_option=storage)
    made = []
    for name, ev_option in (("memory", None), ("disk", option)):
        table = sok.EmbeddingVariable(DIM, name="t", ev_option=ev_option)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.01))
        made.append((name, table, optimizer))
    return made


def keys_of(args, rng, uniform):
    """Keys `[batch, features]`, drawn by Zipf's law over all keys, or uniformly."""
    from benchmarks import workloads

    shape = (args.batch, FEATURES)
    if uniform:
        return rng.integers(0, args.keys, shape)
    return workloads.zipf(rng, EXPONENT, args.keys, shape)


def step_of(table, optimizer, dense):
    import tensorflow as tf

    weights = [layer.trainable_variables for layer in dense]
    of_dense = tf.keras.optimizers.SGD(0.01) if dense else None

    @tf.function(reduce_retracing=True)
    def step(keys):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, tf.reshape(keys, [-1]))
            outputs = tf.reshape(rows, [-1, FEATURES * DIM])
            for layer in dense:
                outputs = layer(outputs)
            loss = tf.reduce_mean(tf.square(outputs - 1.0))
        variables = [v for of_layer in weights for v in of_layer]
        of_table, *gradients = tape.gradient(loss, [table, *variables])
        optimizer.apply_gradients([(of_table, table)])
        if dense:
            of_dense.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    import sok_like as sok

    sok.Init(global_batch_size=args.batch)
    for kind in ("tables", "model"):
        rng = np.random.default_rng(1)
        steps = {}
        for name, table, optimizer in tables(args):
            dense = []
            if kind == "model":
                dense = [tf.keras.layers.Dense(n, "relu") for n in (1024, 512, 256, 1)]
                width = FEATURES * DIM
                for layer in dense:
                    layer.build([None, width])
                    width = layer.units
            steps[name] = (table, step_of(table, optimizer, dense))
        fill(args, rng, steps)
        for uniform in (False, True):
            report(args, rng, steps, f"{kind}, {'uniform' if uniform else 'Zipf 1.05'}", uniform)


def fill(args, rng, steps):
    """Inserts rows in their order of arrival by Zipf's law, then all remaining keys."""
    batches = [keys_of(args, rng, False) for _ in range(args.keys // (args.batch * FEATURES))]
    rest = np.arange(args.keys)
    rest = np.append(rest, np.zeros(-len(rest) % (args.batch * FEATURES), rest.dtype))
    batches += list(rest.reshape(-1, args.batch, FEATURES))
    batches += [keys_of(args, rng, False) for _ in range(20)]
    for _, step in steps.values():
        for keys in batches:
            step(keys)


def report(args, rng, steps, what, uniform):
    times: dict[str, list[float]] = {"memory": [], "disk": []}
    table = steps["disk"][0]
    for i in range(args.steps + 10):
        keys = keys_of(args, rng, uniform)
        if i == 10:
            before = table.stats()
        losses = []
        for name, (_, step) in steps.items():
            start = time.perf_counter()
            losses.append(float(step(keys)))
            if i >= 10:
                times[name].append(1000 * (time.perf_counter() - start))
    after = table.stats()
    memory, disk = (statistics.median(times[name]) for name in ("memory", "disk"))
    blocks = (after.bytes_read - before.bytes_read) / 4096 / args.steps
    print(
        f"{what}: {memory:.1f} ms in memory, {disk:.1f} ms on disk, ratio {disk / memory:.2f}; "
        f"{blocks:.0f} blocks read per step, {after.resident_bytes / 2**20:.0f} of "
        f"{after.file_bytes / 2**20:.0f} MiB in memory",
        flush=True,
    )


if __name__ == "__main__":
    main()
