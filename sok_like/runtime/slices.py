"""Sparse gradients, `tf.IndexedSlices`, with each index once.

A gradient of one lookup has each key once. TensorFlow concatenates the gradients of several lookups
of one table, so a key occurs in it as often as lookups have read it. Updates sum equal keys anyway.
What is not linear, such as a norm, needs `distinct` first.
"""

from __future__ import annotations

import tensorflow as tf

_UNIQUE = "_sok_keys_are_unique"  # an attribute of tensors


def mark_unique(keys: tf.Tensor) -> tf.Tensor:
    """Says that a tensor of keys holds each once, within the function that makes it; returns it."""
    setattr(keys, _UNIQUE, True)
    return keys


def keys_are_unique(gradient: tf.IndexedSlices) -> bool:
    """Whether the gradient is known to have each key once.

    TensorFlow concatenates the gradients of several lookups, which makes a new tensor of keys.
    """
    return getattr(gradient.indices, _UNIQUE, False)


def distinct(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each index once; values of equal indices are summed."""
    if keys_are_unique(gradient):
        return gradient
    indices, inverse = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, inverse, tf.size(indices))
    return tf.IndexedSlices(values, mark_unique(indices), gradient.dense_shape)


def summed_values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The values of a gradient of either kind, those of equal indices summed."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return distinct(gradient).values if is_sparse else tf.convert_to_tensor(gradient)
