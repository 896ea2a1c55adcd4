"""Norms of gradients over ranks, for programs that clip by hand.

A tape gives a rank the gradients of its own keys, and for ordinary variables those of its own
batch. A clipping factor computed from them would differ between ranks, and weights would drift
apart. So `tf.clip_by_global_norm` and `tf.linalg.global_norm` of lists with gradients of tables,
and `tf.clip_by_norm` of such a gradient, use the norm that one process with the whole batch would
see. Squares of tables' gradients are summed over ranks; other gradients are averaged first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import clip_ops
from tensorflow.python.util import dispatch

from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime import comm, hooks, turns

_PART, _SHAPE_OF_PART = "_sok_part", tf.int64


def marked_part(gradient: Any) -> Any:
    """Marks the gradient of a variable of which each rank has its own part; None stays None.

    Slices are marked by the dtype of their dense shape, which survives the end of a function;
    TensorFlow uses int32. On tensors the mark lasts within the function only.
    """
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape
        shape = shape if shape is None else tf.cast(shape, _SHAPE_OF_PART)
        return tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if gradient is not None:
        setattr(gradient, _PART, True)
    return gradient


def is_part(gradient: Any) -> bool:
    """Whether other ranks have other parts of it: it is marked, or a table's gradient."""
    # TensorFlow's gradients of ordinary variables have a dense shape.
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.dense_shape is None or gradient.dense_shape.dtype == _SHAPE_OF_PART
    return hasattr(gradient, _PART)


def summed_over_ranks(squares: tf.Tensor) -> tf.Tensor:
    """The sum of a scalar over ranks; a collective."""
    communicator = comm.current()
    mine = tf.reshape(tf.cast(squares, tf.float32), [1])
    name = unique_in_graph("sok_norm")
    every = turns.collective_in_turn(communicator, "all_gather", mine, name)
    return tf.cast(tf.reduce_sum(every), squares.dtype)


def _global_norm(own, t_list, name=None):
    if comm.current_or_single().world_size == 1 or not _has_parts(t_list):
        return own(t_list, name)
    parts = [g for g in t_list if g is not None and is_part(g)]
    whole = _averaged([g for g in t_list if g is not None and not is_part(g)])
    squares = summed_over_ranks(_squares(parts))
    return tf.sqrt(squares + tf.cast(_squares(whole), squares.dtype), name=name)


def _has_parts(t_list):
    """Whether the list has a part, and nothing for which another function is registered."""
    if not isinstance(t_list, Sequence):
        return False
    given = [gradient for gradient in t_list if gradient is not None]
    known = all(isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) for gradient in given)
    return known and any(map(is_part, given))


@tf.experimental.dispatch_for_api(tf.clip_by_norm, {"t": tf.IndexedSlices})
def _clip_by_norm(t, clip_norm, axes=None, name=None):
    alone = comm.current_or_single().world_size == 1
    if alone or not is_part(t) or axes is not None:
        return NotImplemented
    norm = tf.sqrt(summed_over_ranks(_squares([t])))
    limit = tf.cast(clip_norm, norm.dtype)
    values = tf.identity(t.values * limit / tf.maximum(norm, limit), name=name)
    return tf.IndexedSlices(values, t.indices, t.dense_shape)


def _averaged(gradients):
    if not gradients:
        return []
    name = unique_in_graph("sok_norm_of_averages")
    return turns.collective_in_turn(comm.current(), "average", gradients, name)


def _squares(gradients):
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    sums = [tf.reduce_sum(tf.square(value)) for value in values]
    return tf.add_n([tf.cast(each, sums[0].dtype) for each in sums]) if sums else tf.zeros([])


@hooks.at_init
def _install():
    stock = clip_ops.global_norm
    hook = hooks.wrap(clip_ops, "global_norm", _global_norm, "norms of gradients count all ranks")
    # Lets `tf.experimental.dispatch_for_api` accept it as it accepts the stock function.
    signatures = dispatch._TYPE_BASED_DISPATCH_SIGNATURES
    signatures[hook.value] = signatures[stock]
