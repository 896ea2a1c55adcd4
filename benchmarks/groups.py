"""Many tables in one group lookup, beside one call a table and beside TensorFlow's own in a loop.

    G26    26 tables, batch 2048 over all ranks, 1 to 4 keys a sample, mean, dim 16, 10k rows each
    G300   300 tables, the same batch

A step is lookup, gradient from a given upstream gradient, Adagrad. TensorFlow's side are dense
variables, given row numbers; on several ranks each rank has them all, and gradients are averaged as
`sok.OptimizerWrapper` averages those of ordinary variables.

    mpirun -np 2 python -m benchmarks --only groups --threads 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks import workloads
from benchmarks.harness import Contender, Match
from benchmarks.steps import cycle, dense_variable, insert, trainer
from sok_like import comm

BATCHES = 8  # distinct batches, then the first again
GROUP, EACH, STOCK = "ours", "ours, a call each", "tf.nn.embedding_lookup_sparse in a loop"


class Samples(NamedTuple):
    """This rank's samples of a table, a list over batches.

    Attributes:
        positions: int64 `[num_keys]`, rows of the table's array.
        row_splits: int64 `[batch + 1]`.
    """

    positions: list[np.ndarray]
    row_splits: list[np.ndarray]


class Tables(NamedTuple):
    """The workload."""

    samples: list[Samples]
    num_rows: int
    dim: int


def tables(num_tables: int, rank: int, world_size: int, quick: bool = False) -> Tables:
    """Hotness uniform in 1 to 4, Zipf as in W1; each rank has a part of the batch."""
    batch, num_rows = (256, 500) if quick else (2048, 10_000)
    found = []
    for t in range(num_tables):
        rng = np.random.default_rng([t, rank])
        order = np.random.default_rng(t).permutation(num_rows)
        splits = [
            np.concatenate([[0], np.cumsum(rng.integers(1, 5, batch // world_size))])
            for _ in range(BATCHES)
        ]
        drawn = [workloads.zipf(rng, workloads.ZIPF_EXPONENT, num_rows, s[-1]) for s in splits]
        found.append(Samples([order[d] for d in drawn], splits))
    return Tables(found, num_rows, 16)


def groups(num_tables: int, quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """The lookup alone, and a step."""
    communicator = comm.current()
    data = tables(num_tables, communicator.rank, communicator.world_size, quick)
    everything = workloads.mixed(np.arange(data.num_rows))
    splits = [[tf.constant(t.row_splits[b]) for t in data.samples] for b in range(BATCHES)]
    positions = [[tf.constant(t.positions[b]) for t in data.samples] for b in range(BATCHES)]
    keys = [
        [tf.constant(workloads.mixed(t.positions[b])) for t in data.samples] for b in range(BATCHES)
    ]
    ours = list(zip(keys, splits, strict=True))
    theirs = list(zip(positions, splits, strict=True))

    def contender(kind):
        if kind == STOCK:
            variables = [dense_variable(data.num_rows, data.dim) for _ in data.samples]
        else:
            name = "group" if kind == GROUP else "each"
            variables = [
                sok.EmbeddingVariable(data.dim, name=f"{name}_{t}") for t in range(num_tables)
            ]
            for variable in variables:
                insert(variable, everything)
        wrap = kind != STOCK or communicator.world_size > 1
        step, look = trainer("Adagrad", variables, FORWARD[kind](variables), wrap=wrap)
        inputs = theirs if kind == STOCK else ours
        return {
            f"{kind} (lookup)": Contender(cycle(look, inputs)),
            f"{kind} (step)": Contender(cycle(step, inputs)),
        }

    contenders: dict[str, Contender] = {}
    for kind in (GROUP, EACH, STOCK):
        contenders.update(contender(kind))
    matches = [
        Match(
            f"G{num_tables} {what}, {communicator.world_size} rank(s)",
            f"{GROUP} ({what})",
            f"{peer} ({what})",
        )
        for what in ("lookup", "step")
        for peer in (EACH, STOCK)
    ]
    return contenders, matches


def _ragged(keys, row_splits):
    return [
        tf.RaggedTensor.from_row_splits(k, s, validate=False)
        for k, s in zip(keys, row_splits, strict=True)
    ]


def _group(variables):
    combiners = ["mean"] * len(variables)
    return lambda keys, row_splits: sok.group_embedding_lookup_sparse(
        variables, _ragged(keys, row_splits), combiners, name="bench_group"
    )


def _each(variables):
    return lambda keys, row_splits: [
        sok.group_embedding_lookup_sparse([v], [ids], ["mean"], name=f"bench_each_{t}")[0]
        for t, (v, ids) in enumerate(zip(variables, _ragged(keys, row_splits), strict=True))
    ]


def _stock(variables):
    return lambda positions, row_splits: [
        tf.nn.embedding_lookup_sparse(v, ids, None, combiner="mean")
        for v, ids in zip(variables, _ragged(positions, row_splits), strict=True)
    ]


FORWARD = {GROUP: _group, EACH: _each, STOCK: _stock}
