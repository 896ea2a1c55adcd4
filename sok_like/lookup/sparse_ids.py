"""SparseTensors of ids: sorted by sample first, as everything behind this expects them."""

from __future__ import annotations

import tensorflow as tf


def in_order(sparse: tf.SparseTensor) -> tf.SparseTensor:
    """The SparseTensor in canonical order: by sample, then by column.

    Its values would be counted to other samples otherwise. TensorFlow's own lookups raise; raising
    here would leave the other ranks waiting. Where the order is right already, the op passes its
    inputs on.
    """
    return tf.sparse.reorder(sparse)


def as_ragged(sparse: tf.SparseTensor) -> tf.RaggedTensor:
    """Sparse ids as ragged ones, `[batch, None]`."""
    sparse = in_order(sparse)
    return tf.RaggedTensor.from_row_splits(sparse.values, row_splits(sparse), validate=False)


def row_splits(sparse: tf.SparseTensor) -> tf.Tensor:
    """int64 `[batch + 1]`: where each sample begins in a SparseTensor that is in order.

    Half the ops of `RaggedTensor.from_value_rowids`.
    """
    samples = tf.range(sparse.dense_shape[0] + 1)
    return tf.raw_ops.LowerBound(
        sorted_inputs=sparse.indices[tf.newaxis, :, 0],
        values=samples[tf.newaxis],
        out_type=tf.int64,
    )[0]
