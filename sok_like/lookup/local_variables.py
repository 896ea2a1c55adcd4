"""What belongs to one rank: variables, parts of gradients and their norms, batches.

    parts of several lookups --sum of equal keys--> values --squares--> sum over ranks

A rank's own variables are neither averaged over ranks nor broadcast. A tape gives a rank the
gradients of its own keys, and for ordinary variables those of its own batch. A clipping factor
computed from them would differ between ranks, and weights would drift apart. Where several lookups
have read a key, its gradient is the sum of what the tape returns. So `tf.clip_by_global_norm` and
`tf.linalg.global_norm` of lists with gradients of tables, and `tf.clip_by_norm` and
`tf.clip_by_value` of such a gradient, see what one process with the whole batch and a dense
gradient would see. Ordinary gradients in these lists are averaged first.

The gradient of a hash table has no dense shape, and is known by that. Others are known by a mark:

    mark_local(variable) --tape--> gradient of this rank's part, marked --> norms over all ranks

Only in a program with such variables, or on several ranks, are `tf.GradientTape` and Keras'
optimizers wrapped for that.

`gather_batch` joins batches, for losses over the global batch:

    rank 0: [a, b]    rank 1: [c]    =gather=>    both: [a, b, c]
    gradients of [a, b, c] on rank 0 and rank 1   =sum=>   [a, b] to rank 0, [c] to rank 1
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import clip_ops
from tensorflow.python.util import dispatch

from sok_like.runtime.framework import graphs, hooks
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers
from sok_like.runtime.ranks import comm, exchange_order, horovod
from sok_like.runtime.ranks.comm import distinct, summed_values
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.variable import is_embedding_variable

PART, SHAPE_OF_PART = "_sok_part", tf.int64  # marks of tensors, and of slices
# Names of variables that are not some rows of one table, by shape: their gradients lose this mark,
# unlike the dtype, where a function returns them.
_without_norm: dict[tuple[int, ...], str] = {}
# How often each name was used, by graph.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def faces(variable: Any):
    """All objects by which a variable is seen: itself, the one it wraps, and their handles."""
    seen = [variable]
    for name in ("_value", "_variable"):  # of Keras 3, and of tf_keras' mixed precision
        inner = getattr(variable, name, None)
        if isinstance(inner, tf.Variable):
            seen.append(inner)
    # Reference variables (`tf.disable_v2_behavior()`) have no handle.
    handles = [getattr(face, "handle", None) for face in seen if isinstance(face, tf.Variable)]
    return seen + [handle for handle in handles if handle is not None]


def is_local(variable: Any) -> bool:
    """Whether a variable is this rank's own: neither averaged over ranks nor broadcast.

    True for marked variables and every EmbeddingVariable, whichever layer it belongs to.

    Args:
        variable: Any object; for what is not a variable the result is False.
    """
    return is_embedding_variable(variable) or any(
        getattr(face, "de_local", False) for face in faces(variable)
    )


def unique_in_graph(name: str) -> str:
    """`name`, with a number from its second use in the graph being built."""
    # Collectives of one graph may run at the same time and are matched by name. The number must be
    # the same on all ranks, so it is counted per graph: a rank may trace a function again, for an
    # odd batch, while others do not. Eager collectives end before the next one begins.
    if tf.executing_eagerly():
        return name
    names = _used.setdefault(tf.compat.v1.get_default_graph(), {})
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}_{names[name]}"


def is_part(gradient: Any) -> bool:
    """Whether other ranks have other parts of it: it is marked, or a table's gradient."""
    # TensorFlow's gradients of ordinary variables have a dense shape.
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape  # a program's own may be a list
        return shape is None or getattr(shape, "dtype", None) == SHAPE_OF_PART
    return hasattr(gradient, PART)


def squared_norm(*parts: Any) -> tf.Tensor:
    """The squared norm over all ranks of gradients of which each has a part; a collective."""
    return _summed_over_ranks(_squares(parts))


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
    others = [g for g in t_list if g is not None and not is_part(g)]
    if others and comm.current_or_single().world_size > 1:
        turn = unique_in_graph("sok_norm_of_averages")
        others = exchange_order.collective_in_turn(comm.current(), "average", others, turn)
    of_parts = squared_norm(*parts)
    return tf.sqrt(of_parts + tf.cast(_squares(others), of_parts.dtype), name=name)


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
    marks = t.dense_shape if sparse else t
    of = getattr(marks, PART, "")
    if marks is not None and tf.executing_eagerly() and not hasattr(marks, PART):
        of = _without_norm.get(tuple(marks.numpy().tolist()), "")
    if of:
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


def _squares(gradients):
    sums = [tf.reduce_sum(tf.square(summed_values(gradient))) for gradient in gradients]
    return tf.add_n([tf.cast(one, sums[0].dtype) for one in sums]) if sums else tf.zeros([])


def mark_local(variable: Any, has_norm: bool = True) -> Any:
    """Marks a variable as this rank's own; returns it. `has_norm`: it has rows of one table."""
    hooks.at_init(mark_gradients)
    if not has_norm:
        _without_norm[tuple(variable.shape)] = variable.name
    for face in faces(variable):
        try:
            face.de_local, face._sok_has_norm = True, has_norm
        except AttributeError:  # a symbolic handle takes no attributes
            pass
    return variable


def marked(gradient: Any, variable: Any) -> Any:
    """The gradient of a variable, marked as a part if each rank has its own one of the variable."""
    if not is_local(variable):
        return gradient
    has_norm = all(getattr(face, "_sok_has_norm", True) for face in faces(variable))
    return marked_part(gradient, "" if has_norm else variable.name)


def marked_part(gradient: Any, without_norm: str = "") -> Any:
    """Marks the gradient of a variable of which each rank has its own part; None stays None."""
    # Slices are marked by the dtype of their dense shape, which survives the end of a function;
    # TensorFlow uses int32. On tensors the mark lasts within the function only. `without_norm` is
    # the variable's name if it is not some rows of one table: then `tf.clip_by_norm` raises.
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape
        if shape is not None:
            shape = tf.cast(shape, SHAPE_OF_PART)
            setattr(shape, PART, without_norm)
        return tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if isinstance(gradient, tf.Tensor):
        gradient = tf.identity(gradient)  # another variable may have the same tensor
        setattr(gradient, PART, without_norm)
    return gradient


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
    return clipped(self, grads) if has_parts(grads) else own(self, grads)


def clipped(optimizer: Any, grads: list) -> list:
    """The gradients, clipped by TensorFlow's functions as a Keras optimizer says."""
    if optimizer.clipnorm:
        return [tf.clip_by_norm(gradient, optimizer.clipnorm) for gradient in grads]
    if optimizer.global_clipnorm:
        return tf.clip_by_global_norm(grads, optimizer.global_clipnorm)[0]
    if limit := optimizer.clipvalue:
        return [tf.clip_by_value(gradient, -limit, limit) for gradient in grads]
    return grads


def mark_gradients() -> None:
    """For `hooks.at_init`: marks gradients where a tape or an optimizer gets them."""
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


def gather_batch(tensor: Any, name: str = "gather_batch") -> tf.Tensor:
    """The ranks' tensors joined along their first axis, in rank order; every rank must call it.

    For losses that compare a sample with those of other ranks, such as in-batch negatives. The
    gradient of a row is the sum of its gradients in all ranks' losses. So each rank takes the loss
    of its own samples against all rows. The mean of these losses over ranks has the gradient of one
    process with the global batch, as everywhere else in `fit`.

    Args:
        tensor: Numbers `[batch, ...]`; the batch may differ between ranks, other axes may not.
        name: Name of the collective, the same on all ranks.

    Returns:
        The same dtype, `[sum of batches, ...]`. On one rank it is `tensor`.

    Raises:
        ValueError: `tensor` is a scalar.
        TypeError: it does not hold numbers.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(f"`tensor` must be of shape [batch, ...]. Received: the scalar {tensor!r}")
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(f"`tensor` must hold numbers. Received: {tensor.dtype.name}")
    ensure_initialized()
    communicator = comm.current()
    if communicator.world_size == 1:
        return tensor
    name = unique_in_graph(name)

    def gather():
        size = tf.shape(tensor, tf.int64)[:1]
        sizes = communicator.all_gather(size, f"{name}_sizes")
        return communicator.all_gather(tensor, name), sizes

    @tf.custom_gradient
    def run(tensor):
        gathered, sizes = exchange_order.exchange_in_turn(gather, name, communicator)
        gathered.set_shape([None, *tensor.shape[1:]])

        def back(grad):
            @tf.custom_gradient
            def send_back(grad):
                turn = f"{name}_grad"
                total = exchange_order.collective_in_turn(communicator, "sum", grad, turn)
                start = tf.reduce_sum(sizes[: communicator.rank])
                of_this_rank = total[start : start + sizes[communicator.rank]]
                return of_this_rank, lambda second: graphs.refuse_second_order([second], [grad])[0]

            return tf.ensure_shape(send_back(tf.convert_to_tensor(grad)), tensor.shape)

        return gathered, back

    return run(tensor)


@hooks.at_init
def _install():
    horovod.leave_alone(is_local)
    why = "norms of gradients count all ranks"
    for name, function in (("global_norm", _global_norm), ("clip_by_norm", _clip_by_norm)):
        stock = getattr(clip_ops, name)
        hook = hooks.wrap(clip_ops, name, function, why)
        # Lets `tf.experimental.dispatch_for_api` accept it as it accepts the stock function.
        signatures = dispatch._TYPE_BASED_DISPATCH_SIGNATURES
        signatures[hook.value] = signatures[stock]
