"""Ids of hash tables, by table and by sample, as all later code expects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup import exporting
from sok_like.runtime.native import libraries
from sok_like.table.keys import as_keys


class KeySamples(NamedTuple):
    """Keys of a table, by sample."""

    keys: tf.Tensor  # int64 `[num_keys]`
    row_splits: tf.Tensor  # int64 `[batch + 1]`
    weights: tf.Tensor | None  # float32 `[num_keys]`, or None for ones


def samples_of(
    sparse: Sequence[tf.SparseTensor], weights: Sequence[Any] | None = None
) -> list[KeySamples]:
    """Keys of hash tables by sample, with one op for all tables.

    Integers are `[batch, max_hotness]` in any order, weights `[num_keys]` in theirs, or None.
    """
    keys = [as_keys(s.values) for s in sparse]
    weights = [None] * len(sparse) if weights is None else list(weights)
    floats = [None if w is None else tf.cast(w, tf.float32) for w in weights]
    if not sparse:
        return []
    if exporting.current() is not None:
        return [_with_stock_ops(*item) for item in zip(sparse, keys, floats, strict=True)]
    with tf.device("CPU:0"):
        samples = libraries.ops().sok_sparse_samples(
            indices=[s.indices for s in sparse],
            keys=keys,
            weights=[tf.zeros([0]) if w is None else w for w in floats],
            dense_shapes=[s.dense_shape for s in sparse],
        )
    return [
        KeySamples(k, splits, None if w is None else ordered)
        for k, splits, w, ordered in zip(
            samples.sorted_keys, samples.row_splits, floats, samples.sorted_weights, strict=True
        )
    ]


def samples_by_table(
    samples: tf.RaggedTensor, weights: tf.Tensor | None, table_splits: tf.Tensor, num_tables: int
) -> list[KeySamples]:
    """Keys of hash tables by table and sample, with one op for all tables.

    Samples `[num_samples, None]` of the first table come first; `table_splits`
    `[num_tables + 1]` has the first sample of each table, and the end.
    """
    floats = None if weights is None else tf.cast(weights, tf.float32)
    with tf.device("CPU:0"):
        by_table = libraries.ops().sok_group_samples(
            keys=as_keys(samples.values),
            weights=tf.zeros([0]) if floats is None else floats,
            table_splits=tf.cast(table_splits, tf.int64),
            row_splits=tf.cast(samples.row_splits, tf.int64),
            N=num_tables,
        )
    return [
        KeySamples(keys, splits, None if floats is None else its_weights)
        for keys, its_weights, splits in zip(*by_table, strict=True)
    ]


def _with_stock_ops(sparse, keys, weights):
    ordered = in_order(tf.SparseTensor(sparse.indices, keys, sparse.dense_shape))
    if weights is not None:
        weights = in_order(tf.SparseTensor(sparse.indices, weights, sparse.dense_shape)).values
    return KeySamples(ordered.values, row_splits(ordered), weights)


def in_order(sparse: tf.SparseTensor) -> tf.SparseTensor:
    """The SparseTensor in canonical order: by sample, then by column.

    Otherwise values would be assigned to other samples. TensorFlow's own lookups raise then, but
    raising here would leave the other ranks waiting. If the order is right already, the op passes
    its inputs on.
    """
    return tf.sparse.reorder(sparse)


def as_ragged(sparse: tf.SparseTensor, hashed: bool = False) -> tf.RaggedTensor:
    """Sparse ids as ragged ids `[batch, None]`; with `hashed` as int64 keys of hash tables."""
    if hashed and sparse.shape.rank == 2:
        (samples,) = samples_of([sparse])
        return tf.RaggedTensor.from_row_splits(samples.keys, samples.row_splits, validate=False)
    sparse = in_order(sparse)
    return tf.RaggedTensor.from_row_splits(sparse.values, row_splits(sparse), validate=False)


def row_splits(sparse: tf.SparseTensor) -> tf.Tensor:
    """int64 `[batch + 1]`: where each sample begins in a SparseTensor that is in order.

    Takes half the ops of `RaggedTensor.from_value_rowids`.
    """
    samples = tf.range(sparse.dense_shape[0] + 1)
    return tf.raw_ops.LowerBound(
        sorted_inputs=sparse.indices[tf.newaxis, :, 0],
        values=samples[tf.newaxis],
        out_type=tf.int64,
    )[0]
