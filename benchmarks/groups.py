"""Many tables: in one group lookup, in one call per table, and in a loop of TensorFlow's lookups.

    G26    26 tables, batch 256 over all ranks, 1 to 4 keys per sample, mean, dim 16, 10k rows each
    G300   300 tables, the same batch
    G1, G26 at batch 1: one key for each table

A step is lookup, gradient from a given upstream gradient, and Adagrad. TensorFlow's contender uses
dense variables and row numbers. Each rank has all of its tables, and gradients are averaged as
`sok.OptimizerWrapper` averages those of ordinary variables.

    python -m sok_like.run -np 2 -m benchmarks --only groups --threads 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks import workloads
from benchmarks.harness import Contender, Match
from benchmarks.steps import cycle, dense_variable, insert
from sok_like.runtime.ranks import comm

BATCHES = 8  # number of distinct batches, used in turn
GROUP, EACH, STOCK = "ours", "ours, a call each", "tf.nn.embedding_lookup_sparse in a loop"


class Tables(NamedTuple):
    """This rank's samples, as lists over batches; each batch is two tensors for all tables.

    Attributes:
        positions: int64 `[num_keys]`, rows of the tables' arrays, table after table.
        row_splits: int64 `[num_tables, batch + 1]`.
        num_rows: Rows per table.
        dim: Length of a row.
    """

    positions: list[np.ndarray]
    row_splits: list[np.ndarray]
    num_rows: int
    dim: int


def tables(num_tables: int, batch: int, quick: bool, most: int) -> Tables:
    """Hotness is uniform in 1 to `most`, keys follow Zipf's law as in W1; each rank has a part."""
    rank, world_size = comm.current().rank, comm.current().world_size
    num_rows = 500 if quick else 10_000
    rng = np.random.default_rng([num_tables, rank])
    order = np.random.default_rng(num_tables).permutation(num_rows)
    positions, row_splits = [], []
    for _ in range(BATCHES):
        hotness = rng.integers(1, most + 1, [num_tables, max(1, batch // world_size)])
        splits = np.concatenate([np.zeros([num_tables, 1], int), np.cumsum(hotness, axis=1)], 1)
        drawn = workloads.zipf(rng, workloads.ZIPF_EXPONENT, num_rows, hotness.sum())
        positions.append(order[drawn])
        row_splits.append(splits)
    return Tables(positions, row_splits, num_rows, 16)


def groups(
    num_tables: int, batch: int, quick: bool, most: int = 4, kinds: Any = None
) -> tuple[dict[str, Contender], list[Match]]:
    """Contenders for the lookup alone and for a step."""
    data = tables(num_tables, batch, quick, most)
    splits = [tf.constant(s) for s in data.row_splits]
    positions = [tf.constant(p) for p in data.positions]
    keys = [tf.constant(workloads.mixed(p)) for p in data.positions]
    contenders: dict[str, Contender] = {}
    for kind in kinds or LOOKUPS:
        if kind == STOCK:
            variables = [dense_variable(data.num_rows, data.dim) for _ in range(num_tables)]
        else:
            variables = [
                sok.EmbeddingVariable(data.dim, name=f"{kind}_{num_tables}_{t}")
                for t in range(num_tables)
            ]
            for variable in variables:
                insert(variable, workloads.mixed(np.arange(data.num_rows)))
        look, step = _functions(
            LOOKUPS[kind], variables, kind != STOCK or comm.current().world_size > 1
        )
        inputs = list(zip(positions if kind == STOCK else keys, splits, strict=True))
        contenders[f"{kind} (lookup)"] = Contender(cycle(look, inputs))
        contenders[f"{kind} (step)"] = Contender(cycle(step, inputs))
    matches = [
        Match(f"G{num_tables} {what}, batch {batch}", f"{GROUP} ({what})", f"{peer} ({what})")
        for what in ("lookup", "step")
        for peer in (EACH, STOCK)
    ]
    return contenders, matches


def _functions(lookup, variables, wrap):
    """Functions of a batch: the lookup alone, concatenated as in an input layer, and a step."""
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.01)
    if wrap:
        optimizer = sok.OptimizerWrapper(optimizer)

    def embeddings(keys, row_splits):
        every = tf.unstack(row_splits, num=len(variables))
        sizes = tf.ensure_shape(row_splits[:, -1], [len(variables)])
        ids = [
            tf.RaggedTensor.from_row_splits(part, part_splits, validate=False)
            for part, part_splits in zip(tf.split(keys, sizes), every, strict=True)
        ]
        return lookup(variables, ids)

    batch = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([len(variables), None], tf.int64)]

    @tf.function(input_signature=batch)
    def look(keys, row_splits):
        return tf.concat(embeddings(keys, row_splits), 1)

    @tf.function(input_signature=batch)
    def step(keys, row_splits):
        with tf.GradientTape() as tape:
            found = embeddings(keys, row_splits)
        gradients = tape.gradient(found, variables)  # of the sum of all
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return look, step


def _group(variables, ids):
    combiners = ["mean"] * len(variables)
    return sok.group_embedding_lookup_sparse(
        variables, ids, combiners, name=f"bench_group_{len(ids)}"
    )


def _each(variables, ids):
    return [
        sok.group_embedding_lookup_sparse([v], [i], ["mean"], name=f"bench_each_{t}")[0]
        for t, (v, i) in enumerate(zip(variables, ids, strict=True))
    ]


def _stock(variables, ids):
    return [
        tf.nn.embedding_lookup_sparse(v, i, None, combiner="mean")
        for v, i in zip(variables, ids, strict=True)
    ]


LOOKUPS = {GROUP: _group, EACH: _each, STOCK: _stock}
