"""The data of the workloads, in NumPy, the same for every contender.

    W1  26 features, batch 8192, one key each, dim 16, 100k keys per feature
    W2  4 tables, batch 4096, 1 to 20 keys per sample, sum, dim 64, 1M keys per table
    W3  2M new keys in batches of 65,536, dim 16
    W4  65,536 random keys of 2M that are present, dim 16

Keys of W1 and W2 follow Zipf's law with exponent 1.05, cut off at the vocabulary. Dense peers get
positions in their array. Tables get 64-bit keys, which are the hashed positions, so that neighbours
in the array do not have neighbouring keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ZIPF_EXPONENT = 1.05
BATCHES = 64  # number of distinct batches, used in turn


class FixedBatches(NamedTuple):
    """W1: one key per sample and feature.

    Attributes:
        positions: int64 `[num_batches, batch, num_features]`, rows of one array over all features.
        keys: int64, the same shape, `mixed(positions)`.
        num_rows: Rows of that array.
        dim: Length of a row.
    """

    positions: np.ndarray
    keys: np.ndarray
    num_rows: int
    dim: int


class RaggedTable(NamedTuple):
    """W2: the samples of one table.

    Attributes:
        positions: A list over batches of int64 `[num_keys]`, rows of the table's array.
        keys: The same for `mixed(positions)`.
        row_splits: A list over batches of int64 `[batch + 1]`.
    """

    positions: list[np.ndarray]
    keys: list[np.ndarray]
    row_splits: list[np.ndarray]


class RaggedBatches(NamedTuple):
    """W2: tables with their common sizes."""

    tables: list[RaggedTable]
    batch: int
    num_rows: int
    dim: int


class NewKeys(NamedTuple):
    """W3 and W4.

    Attributes:
        keys: int64 `[num_keys]`, all different.
        batch: Number of keys per call.
        dim: Length of a row.
    """

    keys: np.ndarray
    batch: int
    dim: int


def mixed(positions: np.ndarray) -> np.ndarray:
    """int64 keys, one to one: SplitMix64's finaliser of the positions."""
    x = positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def zipf(rng: np.random.Generator, exponent: float, num_rows: int, shape) -> np.ndarray:
    """int64 positions in `[0, num_rows)`: P(k) proportional to 1 / (k + 1)**exponent."""
    cumulative = np.cumsum(1.0 / np.arange(1, num_rows + 1) ** exponent)
    drawn = np.searchsorted(cumulative, rng.random(shape) * cumulative[-1], side="right")
    return np.minimum(drawn, num_rows - 1).astype(np.int64)


def w1(quick: bool = False, batches: int = BATCHES) -> FixedBatches:
    """Concatenated features: the rows of feature f begin at `f * 100_000`."""
    batch, features, rows = (1024, 26, 10_000) if quick else (8192, 26, 100_000)
    rng = np.random.default_rng(1)
    drawn = zipf(rng, ZIPF_EXPONENT, rows, (batches, batch, features))
    # The most frequent rows must not be neighbours in the dense peer's array.
    order = np.stack([rng.permutation(rows) for _ in range(features)])
    positions = order[np.arange(features), drawn] + rows * np.arange(features)
    return FixedBatches(positions, mixed(positions), features * rows, 16)


def w2(quick: bool = False, batches: int = BATCHES) -> RaggedBatches:
    """Hotness uniform in 1 to 20."""
    batch, rows = (512, 50_000) if quick else (4096, 1_000_000)
    rng = np.random.default_rng(2)
    tables = []
    for _ in range(4):
        order = rng.permutation(rows)
        splits = [
            np.concatenate([[0], np.cumsum(rng.integers(1, 21, batch))]) for _ in range(batches)
        ]
        positions = [order[zipf(rng, ZIPF_EXPONENT, rows, s[-1])] for s in splits]
        tables.append(RaggedTable(positions, [mixed(p) for p in positions], splits))
    return RaggedBatches(tables, batch, rows, 64)


def w3(quick: bool = False) -> NewKeys:
    """Keys in no order; their number need not be a multiple of the batch."""
    return NewKeys(mixed(np.arange(100_000 if quick else 2_000_000)), 65_536, 16)


def w4(quick: bool = False, batches: int = BATCHES) -> list[np.ndarray]:
    """Positions `[65_536]` in the keys of `w3`, drawn uniformly, as a list over batches."""
    present = w3(quick)
    rng = np.random.default_rng(4)
    return [rng.integers(0, len(present.keys), present.batch) for _ in range(batches)]
