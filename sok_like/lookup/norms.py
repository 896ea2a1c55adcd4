"""Norms of tables' gradients, for programs that clip by hand.

    parts of several lookups --sum of equal keys--> values --squares--> sum over ranks

A tape gives a rank the gradients of its own keys, and for ordinary variables those of its own
batch. A clipping factor computed from them would differ between ranks, and weights would drift
apart. Where several lookups have read a key, its gradient is the sum of what the tape returns. So
`tf.clip_by_global_norm` and `tf.linalg.global_norm` of lists with gradients of tables, and
`tf.clip_by_norm` and `tf.clip_by_value` of such a gradient, see what one process with the whole
batch and a dense gradient would see. Ordinary gradients in these lists are averaged first.

The gradient of a hash table has no dense shape, and is known by that. Others are known by a mark,
see `local_marks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import clip_ops
from tensorflow.python.util import dispatch

from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.comm import distinct, summed_values

PART, SHAPE_OF_PART = "_sok_part", tf.int64  # marks of tensors, and of slices


def is_part(gradient: Any) -> bool:
    """Whether other ranks have other parts of it: it is marked, or a table's gradient."""
    # TensorFlow's gradients of ordinary variables have a dense shape.
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape  # a program's own may be a list
        return shape is None or getattr(shape, "dtype", None) == SHAPE_OF_PART
    return hasattr(gradient, PART)


def squares(part: Any) -> tf.Tensor:
    """The squared norm over all ranks of a gradient of which each has a part; a collective."""
    return _summed_over_ranks(_squares([part]))


def _summed_over_ranks(numbers):
    communicator = comm.current_or_single()
    if communicator.world_size == 1:
        return numbers
    own, name = tf.cast(numbers, tf.float32)[tf.newaxis], unique_in_graph("sok_norm")
    by_rank = exchange_order.collective_in_turn(communicator, "all_gather", own, name)
    return tf.cast(tf.reduce_sum(by_rank, 0), numbers.dtype)


def _global_norm(own, t_list, name=None):
    if not has_parts(t_list):
        return own(t_list, name)
    parts = [g for g in t_list if g is not None and is_part(g)]
    means = _averaged([g for g in t_list if g is not None and not is_part(g)])
    of_parts = _summed_over_ranks(_squares(parts))
    return tf.sqrt(of_parts + tf.cast(_squares(means), of_parts.dtype), name=name)


def has_parts(t_list: Any) -> bool:
    """Whether the list has a part, and nothing for which another function is registered."""
    if not isinstance(t_list, Sequence):
        return False
    gradients = [gradient for gradient in t_list if gradient is not None]
    are_tensors = all(isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) for gradient in gradients)
    return are_tensors and any(map(is_part, gradients))


def _clip_by_norm(own, t, clip_norm, axes=None, name=None):
    if not is_part(t):
        return own(t, clip_norm, axes, name)
    sparse = isinstance(t, tf.IndexedSlices)
    if of := getattr(t.dense_shape if sparse else t, PART, ""):
        raise ValueError(
            "`tf.clip_by_norm` and an optimizer's `clipnorm` need one table's gradient. This one "
            "is of a `dist_model_parallel` variable with several tables, or with columns of one "
            "whose others are elsewhere. Use `tf.clip_by_global_norm`, `global_clipnorm` or "
            "`clipvalue`, or a `row_slice_threshold` that cuts all tables of the layer by rows. "
            f"Received: the gradient of '{of}'"
        )
    t = distinct(t)
    values = t.values if sparse else t
    sums = tf.reduce_sum(tf.square(values), axes, keepdims=True)
    # Each row is on one rank, so only sums over rows go on over ranks.
    if axes is None or {0, -values.shape.rank} & {*np.ravel(tf.get_static_value(axes))}:
        sums = _summed_over_ranks(sums)
    norm = tf.sqrt(sums)
    limit = tf.cast(clip_norm, norm.dtype)
    values = tf.identity(values * limit / tf.maximum(norm, limit), name=name)
    return tf.IndexedSlices(values, t.indices, t.dense_shape) if sparse else values


@tf.experimental.dispatch_for_api(tf.clip_by_value, {"t": tf.IndexedSlices})
def _clip_by_value(t, clip_value_min, clip_value_max, name=None):
    if not is_part(t):
        return NotImplemented
    t = distinct(t)
    values = tf.clip_by_value(t.values, clip_value_min, clip_value_max, name)
    return tf.IndexedSlices(values, t.indices, t.dense_shape)


def _averaged(gradients):
    if not gradients or comm.current_or_single().world_size == 1:
        return gradients
    name = unique_in_graph("sok_norm_of_averages")
    return exchange_order.collective_in_turn(comm.current(), "average", gradients, name)


def _squares(gradients):
    sums = [tf.reduce_sum(tf.square(summed_values(gradient))) for gradient in gradients]
    return tf.add_n([tf.cast(one, sums[0].dtype) for one in sums]) if sums else tf.zeros([])


@hooks.at_init
def _install():
    why = "norms of gradients count all ranks"
    for name, function in (("global_norm", _global_norm), ("clip_by_norm", _clip_by_norm)):
        stock = getattr(clip_ops, name)
        hook = hooks.wrap(clip_ops, name, function, why)
        # Lets `tf.experimental.dispatch_for_api` accept it as it accepts the stock function.
        signatures = dispatch._TYPE_BASED_DISPATCH_SIGNATURES
        signatures[hook.value] = signatures[stock]
