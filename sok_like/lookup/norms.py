"""Norms of tables' gradients, for programs that clip by hand.

    parts of several lookups --sum of equal keys--> values --squares--> sum over ranks

A tape gives a rank the gradients of its own keys, and for ordinary variables those of its own
batch. A clipping factor computed from them would differ between ranks, and weights would drift
apart. Where several lookups have read a key, its gradient is the sum of what the tape returns. So
`tf.clip_by_global_norm` and `tf.linalg.global_norm` of lists with gradients of tables, and
`tf.clip_by_norm` and `tf.clip_by_value` of such a gradient, see what one process with the whole
batch and a dense gradient would see. Ordinary gradients in these lists are averaged first.

A gradient is known by a mark, which the tape gives it, and an optimizer that clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import clip_ops
from tensorflow.python.util import dispatch

from sok_like.lookup.local_variables import has_norm, is_local, unique_in_graph
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.keras_version import is_keras_3, keras_optimizers
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.comm import distinct, summed_values

_PART, _SHAPE_OF_PART = "_sok_part", tf.int64


def marked(gradient: Any, variable: Any) -> Any:
    """The gradient of a variable, marked as a part if each rank has its own one of the variable."""
    if not is_local(variable):
        return gradient
    return marked_part(gradient, "" if has_norm(variable) else variable.name)


def marked_part(gradient: Any, without_norm: str = "") -> Any:
    """Marks the gradient of a variable of which each rank has its own part; None stays None.

    Slices are marked by the dtype of their dense shape, which survives the end of a function;
    TensorFlow uses int32. On tensors the mark lasts within the function only.

    Args:
        without_norm: The variable's name if it is not some rows of one table. Then
            `tf.clip_by_norm` raises within the function.
    """
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape
        if shape is not None:
            shape = tf.cast(shape, _SHAPE_OF_PART)
            setattr(shape, _PART, without_norm)
        return tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if isinstance(gradient, tf.Tensor):
        gradient = tf.identity(gradient)  # another variable may have the same tensor
        setattr(gradient, _PART, without_norm)
    return gradient


def is_part(gradient: Any) -> bool:
    """Whether other ranks have other parts of it: it is marked, or a table's gradient."""
    # TensorFlow's gradients of ordinary variables have a dense shape.
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape  # a program's own may be a list
        return shape is None or getattr(shape, "dtype", None) == _SHAPE_OF_PART
    return hasattr(gradient, _PART)


def squares(part: Any) -> tf.Tensor:
    """The squared norm over all ranks of a gradient of which each has a part; a collective."""
    return _summed_over_ranks(_squares([part]))


def _summed_over_ranks(numbers):
    communicator = comm.current_or_single()
    if communicator.world_size == 1:
        return numbers
    mine, name = tf.cast(numbers, tf.float32)[tf.newaxis], unique_in_graph("sok_norm")
    every = exchange_order.collective_in_turn(communicator, "all_gather", mine, name)
    return tf.cast(tf.reduce_sum(every, 0), numbers.dtype)


def _global_norm(own, t_list, name=None):
    if not _has_parts(t_list):
        return own(t_list, name)
    parts = [g for g in t_list if g is not None and is_part(g)]
    whole = _averaged([g for g in t_list if g is not None and not is_part(g)])
    of_parts = _summed_over_ranks(_squares(parts))
    return tf.sqrt(of_parts + tf.cast(_squares(whole), of_parts.dtype), name=name)


def _has_parts(t_list):
    """Whether the list has a part, and nothing for which another function is registered."""
    if not isinstance(t_list, Sequence):
        return False
    given = [gradient for gradient in t_list if gradient is not None]
    known = all(isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) for gradient in given)
    return known and any(map(is_part, given))


def _clip_by_norm(own, t, clip_norm, axes=None, name=None):
    if not is_part(t):
        return own(t, clip_norm, axes, name)
    sparse = isinstance(t, tf.IndexedSlices)
    if of := getattr(t.dense_shape if sparse else t, _PART, ""):
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


def _gradient(own, self, target, sources, *args, **kwargs):
    gradients = own(self, target, sources, *args, **kwargs)
    parts = map(marked, tf.nest.flatten(gradients), tf.nest.flatten(sources))
    return tf.nest.pack_sequence_as(gradients, list(parts))


def _apply_pairs(own, self, grads_and_vars, *args, **kwargs):
    """The step of an optimizer of tf_keras, which may have got new tensors since the tape."""
    return own(self, [(marked(g, v), v) for g, v in grads_and_vars], *args, **kwargs)


def _apply(own, self, grads, trainable_variables):
    """The step of an optimizer of Keras 3, which also makes tensors while it accumulates."""
    self.__dict__["_sok_applied"] = trainable_variables
    return own(self, grads, trainable_variables)


def _clip_gradients(own, self, grads):
    """As in tf_keras; Keras 3 computes norms by functions of its own."""
    if variables := self.__dict__.pop("_sok_applied", None):
        grads = list(map(marked, grads, variables))
    if not _has_parts(grads):
        return own(self, grads)
    if self.clipnorm:
        return [tf.clip_by_norm(gradient, self.clipnorm) for gradient in grads]
    if self.global_clipnorm:
        return tf.clip_by_global_norm(grads, self.global_clipnorm)[0]
    if self.clipvalue:
        return [tf.clip_by_value(g, -self.clipvalue, self.clipvalue) for g in grads]
    return grads


def _averaged(gradients):
    if not gradients or comm.current_or_single().world_size == 1:
        return gradients
    name = unique_in_graph("sok_norm_of_averages")
    return exchange_order.collective_in_turn(comm.current(), "average", gradients, name)


def _squares(gradients):
    sums = [tf.reduce_sum(tf.square(summed_values(gradient))) for gradient in gradients]
    return tf.add_n([tf.cast(each, sums[0].dtype) for each in sums]) if sums else tf.zeros([])


@hooks.at_init
def _install():
    why = "norms of gradients count all ranks"
    for name, function in (("global_norm", _global_norm), ("clip_by_norm", _clip_by_norm)):
        stock = getattr(clip_ops, name)
        hook = hooks.wrap(clip_ops, name, function, why)
        # Lets `tf.experimental.dispatch_for_api` accept it as it accepts the stock function.
        signatures = dispatch._TYPE_BASED_DISPATCH_SIGNATURES
        signatures[hook.value] = signatures[stock]
    why = "gradients of variables of which each rank has a part are marked"
    hooks.wrap(tf.GradientTape, "gradient", _gradient, why)
    if is_keras_3():
        stock = keras_optimizers().Optimizer
        hooks.wrap(stock, "_backend_apply_gradients", _apply, why)
        why = "optimizers clip gradients of tables by norms over all ranks"
        hooks.wrap(stock, "_clip_gradients", _clip_gradients, why)
        return
    hooks.wrap(keras_optimizers().Optimizer.__base__, "apply_gradients", _apply_pairs, why)
    hooks.wrap(keras_optimizers().legacy.Optimizer, "_transform_gradients", _apply_pairs, why)
