"""Data of the synthetic models: ids that follow a power law, and labels that can be learned.

A batch is drawn whole, from its number, and then split. So any number of ranks trains on the same
samples; rank r gets the r-th part of each batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from synthetic_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples.

    Attributes:
        ids: int64 `[batch, hotness]`, one item per input.
        numerical: float32 `[batch, num_numerical]`.
        labels: float32 `[batch, 1]`, 0 or 1.
    """

    ids: list[np.ndarray]
    numerical: np.ndarray
    labels: np.ndarray


def power_law(rng: np.random.Generator, alpha: float, num_rows: int, shape) -> np.ndarray:
    """int64 ids in `[0, num_rows)`, mostly small: `id + 1` has the density `x**-alpha`.

    `x` is drawn from `[1, num_rows + 1)` by the inverse of its distribution function and rounded
    down, so no array of a table's size is needed. An `alpha` of 0 draws uniformly.
    """
    u, end = rng.random(shape), num_rows + 1.0
    if alpha == 1:
        x = end**u
    else:
        x = (1 + u * (end ** (1 - alpha) - 1)) ** (1 / (1 - alpha))
    # Rounding may reach the end of the interval.
    return np.minimum(x.astype(np.int64), num_rows) - 1


def make_batch(
    config: ModelConfig, scale: float, batch_size: int, alpha: float, number: int
) -> Batch:
    """The whole batch with this number."""
    rng, tables = np.random.default_rng([2023, number]), config.tables(scale)
    ids = [
        power_law(rng, alpha, tables[each.table].num_rows, (batch_size, each.hotness))
        for each in config.inputs()
    ]
    numerical = rng.random((batch_size, config.num_numerical), np.float32)
    # The numerical features determine the label, but one label in ten is wrong.
    likely = numerical.mean(axis=1, keepdims=True) > 0.5
    labels = np.where(rng.random((batch_size, 1)) < 0.1, ~likely, likely)
    return Batch(ids, numerical, labels.astype(np.float32))


def part_of_rank(batch: Batch, rank: int, num_ranks: int, inputs: list[int] | None) -> Batch:
    """A rank's part of a batch.

    Args:
        batch: The whole batch; its size is divisible by `num_ranks`.
        rank: The rank.
        num_ranks: Number of ranks.
        inputs: None: the rank gets all inputs of its own samples. Otherwise the numbers of the
            inputs that it gets for all samples.
    """
    size = len(batch.labels) // num_ranks
    mine = slice(rank * size, (rank + 1) * size)
    ids = [x[mine] for x in batch.ids] if inputs is None else [batch.ids[i] for i in inputs]
    return Batch(ids, batch.numerical[mine], batch.labels[mine])
