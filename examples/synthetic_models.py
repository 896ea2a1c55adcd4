"""Trains a synthetic recommendation model whose tables are sharded over 1 to N ranks.

    python examples/synthetic_models.py --model tiny --scale 0.05
    python -m sok_like.run -np 2 examples/synthetic_models.py --model tiny --scale 0.05

Six models, from tiny (55 tables, 4.2 GiB) to colossal (2,002 tables, 22 TiB); `--scale` shrinks
their tables until they fit. Prints which rank holds what, samples per second, and the time of a
step.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import synthetic_data
import tensorflow as tf
from synthetic_config import MODELS, ModelConfig

import sok_like as sok
import sok_like.dist_model_parallel as dmp

# Each with its number of slot variables that have the size of the row.
OPTIMIZERS = {
    "sgd": (tf.keras.optimizers.SGD, 0),
    "adagrad": (tf.keras.optimizers.Adagrad, 1),
    "adam": (tf.keras.optimizers.Adam, 2),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a synthetic recommendation model.")
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="tiny")
    add("--scale", type=float, default=1.0, help="rows of every table are multiplied by this")
    add("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    add("--learning_rate", type=float, default=0.01)
    add("--batch_size", type=int, default=4096, help="over all ranks together")
    add("--num_data_batches", type=int, default=10, help="different batches, used in turn")
    add("--num_steps", type=int, default=100)
    add("--warm_up_steps", type=int, default=5, help="not timed; the first ones compile")
    add("--alpha", type=float, default=1.05, help="exponent of the ids' power law; 0: uniform")
    add("--dp_input", action=flag, default=False, help="each rank reads all inputs of its samples")
    add("--strategy", default="memory_balanced")
    for kind in ("column_slice", "row_slice", "data_parallel"):
        add(f"--{kind}_threshold", type=int, metavar="ELEMENTS")
    add("--amp", action=flag, default=False, help="compute in bfloat16, keep tables in float32")
    add("--seed", type=int, default=42)
    arguments = parser.parse_args(argv)
    for name in ("scale", "batch_size", "num_data_batches", "num_steps"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name} must be positive. Received: {getattr(arguments, name)}")
    return arguments


def dense_layers(config: ModelConfig) -> list[tf.keras.layers.Layer]:
    """The layers after the embeddings; the last has width 1."""
    layers = [tf.keras.layers.Dense(units, activation="relu") for units in config.mlp_units]
    return [*layers, tf.keras.layers.Dense(1)]


def interact(embeddings: list, numerical, pool: int):
    """One row per sample: its pooled embeddings and its numerical features.

    Args:
        embeddings: `[batch, width]`, one item per input.
        numerical: `[batch, num_numerical]`.
        pool: Number of neighbouring columns of the embeddings to average.
    """
    columns = tf.concat(embeddings, axis=1)
    if pool > 1:
        columns = tf.nn.avg_pool1d(columns[:, :, tf.newaxis], pool, pool, "SAME")[:, :, 0]
    return tf.concat([columns, tf.cast(numerical, columns.dtype)], axis=1)


class SyntheticModel(tf.keras.Model):
    """Embeddings, spread over the ranks, and dense layers, with a replica on each rank."""

    def __init__(self, config: ModelConfig, scale: float = 1.0, **placement):
        super().__init__()
        self.pool = config.pool
        embeddings = [
            sok.Embedding(table.num_rows, table.width, combiner="sum")
            for table in config.tables(scale)
        ]
        input_table_map = [each.table for each in config.inputs()]
        self.embeddings = dmp.DistributedEmbedding(
            embeddings, input_table_map=input_table_map, **placement
        )
        self.dense = dense_layers(config)

    def call(self, inputs):
        ids, numerical = inputs
        x = interact(self.embeddings(ids), numerical, self.pool)
        for layer in self.dense:
            x = layer(x)
        return tf.cast(x, tf.float32)


def loss_of(labels, logits):
    """Mean binary cross entropy of `[batch, 1]` labels and logits."""
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def make_step(model, optimizer):
    """A training step on this rank's part of a batch, which returns its loss."""

    @tf.function
    def step(ids, numerical, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model((ids, numerical)))
        tape = dmp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def as_tensors(batch: synthetic_data.Batch) -> tuple:
    """Ids, numerical features and labels, as arguments of `make_step`'s function."""
    ids = [tf.constant(x) for x in batch.ids]
    return ids, tf.constant(batch.numerical), tf.constant(batch.labels)


def available_bytes() -> int | None:
    """Free memory of this host in bytes; None if it is unknown."""
    try:
        with open("/proc/meminfo") as file:
            kib = [line.split()[1] for line in file if line.startswith("MemAvailable:")]
        return int(kib[0]) * 1024
    except (OSError, IndexError):
        return None


def check_memory(plan, rank: int, slots: int) -> None:
    """Ends the program if this host's ranks need more memory than it has."""
    neighbours = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get(
        "HOROVOD_LOCAL_SIZE", "1"
    )
    numbers = sum(shard.num_rows * shard.num_columns for shard in plan.shards_on(rank))
    needed = numbers * 4 * (1 + slots) * int(neighbours)
    free = available_bytes()
    if free is not None and needed > free:
        raise SystemExit(
            f"The tables on this host would take {needed / 2**30:,.1f} GiB and "
            f"{free / 2**30:,.1f} GiB are free: use a smaller --scale or more hosts."
        )


def show_progress(step: int, steps: int, loss: float, seconds: float) -> None:
    """Redraws a line at intervals."""
    if step == 1 or step == steps or step % max(1, steps // 20) == 0:
        end = "\n" if step == steps else ""
        text = f"step {step}/{steps}  loss {loss:.4f}  {1e3 * seconds:.1f} ms"
        print(f"\r{text}    ", end=end, flush=True)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Builds, trains and reports; returns the printed figures."""
    arguments = parse_arguments(argv)
    config = MODELS[arguments.model]
    sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
    tf.keras.utils.set_random_seed(arguments.seed)
    if arguments.amp:
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = SyntheticModel(
        config,
        arguments.scale,
        strategy=arguments.strategy,
        dp_input=arguments.dp_input,
        column_slice_threshold=arguments.column_slice_threshold,
        row_slice_threshold=arguments.row_slice_threshold,
        data_parallel_threshold=arguments.data_parallel_threshold,
    )
    embeddings = model.embeddings
    rank, num_ranks = embeddings.rank, embeddings.world_size
    if arguments.batch_size % num_ranks:
        raise SystemExit(
            f"--batch_size must be divisible by the {num_ranks} ranks. "
            f"Received: {arguments.batch_size}"
        )
    make_optimizer, slots = OPTIMIZERS[arguments.optimizer]
    if rank == 0:
        local_batch = arguments.batch_size // num_ranks
        hotness = [each.hotness for each in config.inputs()]
        print(embeddings.strategy.report(local_batch, hotness, slots), flush=True)
    check_memory(embeddings.strategy.plan, rank, slots)

    inputs = None if arguments.dp_input else embeddings.strategy.input_ids_list[rank]
    batches = []
    for number in range(arguments.num_data_batches):
        whole = synthetic_data.make_batch(
            config, arguments.scale, arguments.batch_size, arguments.alpha, number
        )
        part = synthetic_data.part_of_rank(whole, rank, num_ranks, inputs)
        batches.append(as_tensors(part))

    model(batches[0][:2])  # makes the variables
    dmp.broadcast_variables(model.variables, root_rank=0)
    optimizer = make_optimizer(arguments.learning_rate)
    optimizer.build(model.trainable_variables)  # otherwise the step would be compiled twice
    step = make_step(model, optimizer)
    losses, seconds = [], []
    total = arguments.warm_up_steps + arguments.num_steps
    for i in range(total):
        started = time.perf_counter()
        losses.append(float(step(*batches[i % len(batches)])))
        seconds.append(time.perf_counter() - started)
        if rank == 0:
            show_progress(i + 1, total, losses[-1], seconds[-1])
    low, median, high = np.percentile(seconds[arguments.warm_up_steps :], [25, 50, 75])
    if rank == 0:
        print(f"step           {1e3 * median:.2f} ms, median ({1e3 * low:.2f}-{1e3 * high:.2f})")
        print(
            f"samples        {arguments.batch_size / median:,.0f} per second, {num_ranks} rank(s)"
        )
    return {"first_loss": losses[0], "last_loss": losses[-1], "step_seconds": float(median)}


if __name__ == "__main__":
    main()
