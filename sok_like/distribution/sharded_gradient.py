"""Gradients under a distribution; that of a sharded variable behaves like the whole one.

    tape.gradient(loss, kernel)  ->  ShardedGradient: this rank's part, and which part it is

Programs that clip gradients or take their norm expect those of one process. So gradients of
variables are averaged along the batch axis when they are taken. Norms and clipping sum over the
ranks that hold parts. Elementwise functions compute on the parts. Everything else converts a part
to a tensor, which gathers the whole gradient: right, but slow. Optimizers use the part.
"""

from __future__ import annotations

import itertools
import typing
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gradients_util

from sok_like.distribution.collectives import summed
from sok_like.distribution.mesh import Shard
from sok_like.distribution.sharded_variable import shard_of
from sok_like.lookup.local_variables import is_local, is_part, squared_norm, unique_in_graph
from sok_like.runtime.checks import as_list
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.variable import is_embedding_variable

# Shards by key: a TensorFlow ExtensionType can hold strings and numbers, but no other objects.
_shards: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _swapped(function):
    return lambda self, other: function(other, self)


class ShardedGradient(tf.experimental.ExtensionType):
    """This rank's part of a gradient."""

    # The part, `[*local_shape]`; for a sparse gradient some of its rows, `[num_rows, ...]`.
    values: tf.Tensor
    # The row numbers of `values` within the part, `[num_rows]`; int64 `[0]` if the gradient is
    # dense.
    rows: tf.Tensor
    sparse: bool  # whether the gradient is sparse. A row may occur several times
    key: str  # identifies the Shard

    @property
    def _shard(self) -> Shard:
        return _shards[self.key]

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def shape(self):
        """Shape of the whole gradient."""
        return tf.TensorShape(self._shard.global_shape)

    @property
    def local(self) -> Any:
        """The part: a tensor, or `tf.IndexedSlices` with rows of it."""
        if not self.sparse:
            return self.values
        shape = tf.constant(self._shard.local_shape, self.rows.dtype)
        return tf.IndexedSlices(self.values, self.rows, shape)

    def with_values(self, values: tf.Tensor) -> ShardedGradient:
        return ShardedGradient(values, self.rows, self.sparse, self.key)

    def numpy(self):
        return tf.convert_to_tensor(self).numpy()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    __add__, __radd__ = tf.add, _swapped(tf.add)
    __sub__, __rsub__ = tf.subtract, _swapped(tf.subtract)
    __mul__, __rmul__ = tf.multiply, _swapped(tf.multiply)
    __truediv__, __rtruediv__ = tf.divide, _swapped(tf.divide)
    __pow__, __neg__, __abs__ = tf.pow, tf.negative, tf.abs

    def __getitem__(self, item):
        return tf.convert_to_tensor(self)[item]


def sharded_gradient(gradient: Any, variable: Any) -> Any:
    """Wraps this rank's part of a sharded variable's gradient; None stays None."""
    shard = shard_of(variable)
    if gradient is None or shard is None:
        return gradient
    if shard.key is None:
        shard.key = f"{shard.path}#{next(_numbers)}"
        _shards[shard.key] = shard
    if isinstance(gradient, tf.IndexedSlices):
        return ShardedGradient(gradient.values, gradient.indices, True, shard.key)
    # An engine's ops may lose the static shape.
    gradient = tf.ensure_shape(gradient, shard.local_shape)
    return ShardedGradient(gradient, tf.zeros([0], tf.int64), False, shard.key)


def local_part(gradient: Any, variable: Any) -> Any:
    """This rank's part of a sharded variable's gradient; other gradients unchanged."""
    shard = shard_of(variable)
    if gradient is None or shard is None:
        return gradient
    if isinstance(gradient, ShardedGradient):
        return gradient.local
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
        if gradient.shape == tf.TensorShape(shard.global_shape):
            return shard.take(gradient)
        if gradient.shape == tf.TensorShape(shard.local_shape):
            return gradient
    raise ValueError(
        "The gradient of a sharded variable must come from `tf.GradientTape.gradient` or "
        "`tf.gradients`, or be a dense tensor of the variable's shape. "
        f"Received: {gradient!r} for '{shard.path}' of shape {shard.global_shape}"
    )


def _whole(gradient, dtype=None, name=None, as_ref=False):
    """Converts a gradient to a tensor; a collective."""
    del name, as_ref
    if dtype is not None and not dtype.is_compatible_with(gradient.dtype):
        raise TypeError(f"The gradient has the dtype {gradient.dtype}. Received: dtype={dtype!r}")
    return gradient._shard.whole(tf.convert_to_tensor(gradient.local))


tf.register_tensor_conversion_function(ShardedGradient, _whole)


def _squared_norm(gradients: Sequence[Any], sum_rows: bool = False) -> tf.Tensor:
    """The squared norm over all ranks; `tf.norm`, not clipping, first sums the values of a row."""
    present = [gradient for gradient in gradients if gradient is not None]
    of_tables = [gradient for gradient in present if is_part(gradient)]
    squares = [squared_norm(*of_tables)] if of_tables else []
    by_axes: dict[Any, list[tf.Tensor]] = {}  # by mesh and axes, over which they are summed
    for gradient in present:
        axes: Any = (None, ())
        if isinstance(gradient, ShardedGradient):
            axes = gradient._shard.mesh, gradient._shard.axes
            values = comm.summed_values(gradient.local) if sum_rows else gradient.values
        elif is_part(gradient):
            continue
        else:
            sparse = isinstance(gradient, tf.IndexedSlices)
            values = gradient.values if sparse else tf.convert_to_tensor(gradient)
        by_axes.setdefault(axes, []).append(tf.reduce_sum(tf.square(values)))
    for (mesh, axes), sums in by_axes.items():
        total = tf.add_n([tf.cast(one, tf.float32 if axes else present[0].dtype) for one in sums])
        for axis in axes:
            total = summed(total, mesh.along(axis), f"sok_norms_{axis}")
        squares.append(total)
    return tf.add_n([tf.cast(square, present[0].dtype) for square in squares])


_Gradient = typing.Union[ShardedGradient, tf.Tensor, tf.IndexedSlices]  # noqa: UP007 (TensorFlow reads it)


@tf.experimental.dispatch_for_api(tf.linalg.global_norm, {"t_list": list[_Gradient]})
def _global_norm(t_list, name=None):
    if not any(isinstance(gradient, ShardedGradient) for gradient in t_list):
        return NotImplemented  # TensorFlow's function or ours for tables is right
    return tf.sqrt(_squared_norm(t_list), name=name)


@tf.experimental.dispatch_for_api(tf.clip_by_global_norm, {"t_list": list[_Gradient]})
def _clip_by_global_norm(t_list, clip_norm, use_norm=None, name=None):
    sharded = [isinstance(gradient, ShardedGradient) for gradient in t_list]
    if not any(sharded):
        return NotImplemented
    norm = _global_norm(t_list) if use_norm is None else use_norm
    values = [g.values if is_one else g for g, is_one in zip(t_list, sharded, strict=True)]
    clipped, _ = tf.clip_by_global_norm(values, clip_norm, norm, name)
    of_each = zip(t_list, clipped, sharded, strict=True)
    return [g.with_values(v) if is_one else v for g, v, is_one in of_each], norm


@tf.experimental.dispatch_for_api(tf.clip_by_norm, {"t": ShardedGradient})
def _clip_by_norm(t, clip_norm, axes=None, name=None):
    if axes is not None:
        return tf.clip_by_norm(tf.convert_to_tensor(t), clip_norm, axes, name)
    clip_norm = tf.cast(clip_norm, t.dtype)
    factor = clip_norm / tf.maximum(tf.sqrt(_squared_norm([t])), clip_norm)
    return t.with_values(t.values * tf.identity(factor, name=name))


@tf.experimental.dispatch_for_api(tf.norm, {"tensor": ShardedGradient})
def _norm(tensor, ord="euclidean", axis=None, keepdims=None, name=None):
    if axis is not None or keepdims or ord not in ("euclidean", 2):
        return tf.norm(tf.convert_to_tensor(tensor), ord, axis, keepdims, name)
    return tf.sqrt(_squared_norm([tensor], sum_rows=True), name=name)


@tf.experimental.dispatch_for_unary_elementwise_apis(ShardedGradient)
def _unary(function, x):
    # `tf.clip_by_value` with its limits may clip each sparse value.
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    clips_by_value = any(getattr(value, "__name__", "") == "clip_by_value" for value in inside)
    if x.sparse and not clips_by_value:
        return function(tf.convert_to_tensor(x))
    return x.with_values(function(x.values))


_Operand = typing.Union[ShardedGradient, tf.Tensor, int, float]  # noqa: UP007


@tf.experimental.dispatch_for_binary_elementwise_apis(_Operand, _Operand)
def _binary(function, x, y):
    one = x if isinstance(x, ShardedGradient) else y
    parts = [_operand(value, one) for value in (x, y)]
    # Rows of a sparse gradient may repeat, so only products with a number are exact.
    exact = (
        not one.sparse
        or (function.__name__ == "multiply" and x is not y)
        or (function.__name__ in ("divide", "truediv") and one is x)
    )
    if exact and all(part is not None for part in parts):
        return one.with_values(function(*parts))
    whole = [tf.convert_to_tensor(v) if isinstance(v, ShardedGradient) else v for v in (x, y)]
    return function(*whole)


def _operand(value, one):
    """The operand `value` as seen by a gradient's part; None if that is not known."""
    if isinstance(value, ShardedGradient):
        same = value.key == one.key and not (value.sparse or one.sparse)
        return value.values if same or value is one else None
    if isinstance(value, (int, float)) or value.shape.rank == 0:
        return value
    return one._shard.take(value) if value.shape == one.shape and not one.sparse else None


def _of_whole(gradients, sources):
    gradients = completed(gradients, sources, are_parts=True)
    return list(map(sharded_gradient, gradients, sources))


def completed(
    gradients: Sequence[Any],
    sources: Sequence[Any],
    distribution: Any = None,
    *,
    are_parts: bool = False,
) -> list:
    """Gradients of the whole batch: averages along the batch axis those not yet averaged."""
    # Only those of variables are; `distribution` is for variables of no model. If they `are_parts`,
    # as from a tape, those of sharded variables are this rank's.
    result = list(gradients)
    by_line: dict[Any, list[int]] = {}
    for i, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
        of_source = distribution_of(source, distribution)
        if gradient is None or of_source is None:
            continue
        shard, line = shard_of(source), of_source.mesh.along(of_source.batch_dim_name)
        if shard is None:
            is_complete = is_local(source) or getattr(gradient, "_sok_complete", False)
        else:  # reading a variable that is sharded along the batch axis averages its gradient
            is_complete = shard.over_batch or isinstance(gradient, ShardedGradient)
        if line.world_size > 1 and not is_complete:
            by_line.setdefault(line, []).append(i)
    for line, places in by_line.items():
        parts = [
            gradients[i] if are_parts else local_part(gradients[i], sources[i]) for i in places
        ]
        for i, part in zip(places, parts, strict=True):
            if isinstance(part, tf.IndexedSlices) and not hasattr(sources[i], "_sok_distinct"):
                setattr(part, comm.REPEATS, True)  # as in one process
        name = unique_in_graph("sok_distribution_gradients")
        means = exchange_order.collective_in_turn(line, "average", parts, name)
        for i, part, mean in zip(places, parts, means, strict=True):
            if not isinstance(mean, tf.IndexedSlices):
                mean = tf.ensure_shape(mean, part.shape)  # as above
            mean._sok_complete = True
            result[i] = mean
    return result


def distribution_of(source: Any, default: Any = None) -> Any:
    """The distribution of a model's variable, otherwise the default or the current one, or None."""
    if not isinstance(source, (tf.Variable, keras.Variable)) or is_embedding_variable(source):
        return None
    of_model = getattr(source, "_sok_distribution", default)
    current = keras.distribution.distribution() if of_model is None else of_model
    return current if hasattr(current, "mesh") else None


@hooks.at_init
def _install():
    def gradient(own, self, target, sources, *args, **kwargs):
        gradients = tf.nest.flatten(own(self, target, sources, *args, **kwargs))
        return tf.nest.pack_sequence_as(sources, _of_whole(gradients, tf.nest.flatten(sources)))

    def of_graph(own, ys, xs, *args, **kwargs):
        return _of_whole(own(ys, xs, *args, **kwargs), as_list(xs))

    why = "gradients of variables under a distribution are those of the whole batch"
    hooks.wrap(tf.GradientTape, "gradient", gradient, why)
    # `tf.gradients` of TensorFlow 1 and 2 and `tf.hessians` all call this function.
    hooks.wrap(gradients_util, "_GradientsHelper", of_graph, why)
