"""Gradients of `tf.GradientTape` and `tf.gradients` under a distribution.

A rank's own gradient covers its samples and its shard only. Programs that clip gradients or take
their norm expect those of one process. So gradients of variables are averaged along the batch axis
when they are taken, and gradients of shards know which part they are (`sharded_gradient.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import gradients_util

from sok_like.distribution.sharded_gradient import ShardedGradient, local_part, sharded_gradient
from sok_like.distribution.sharded_variable import shard_of
from sok_like.lookup.local_variables import is_local, unique_in_graph
from sok_like.runtime import comm, hooks, turns
from sok_like.table.variable import is_embedding_variable


def _gradient(own, self, target, sources, *args, **kwargs):
    gradients = own(self, target, sources, *args, **kwargs)
    flat = tf.nest.flatten(sources)
    return tf.nest.pack_sequence_as(sources, _of_whole(tf.nest.flatten(gradients), flat))


def _gradients(own, ys, xs, *args, **kwargs):
    flat = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    return _of_whole(own(ys, xs, *args, **kwargs), flat)


def _of_whole(gradients, sources):
    gradients = completed(gradients, sources, are_parts=True)
    return list(map(sharded_gradient, gradients, sources))


def put_under(variables: Sequence[Any], distribution: Any, *, distinct: bool = False) -> None:
    """Stores the distribution of a model's variables.

    Args:
        distinct: Whether their sparse gradients have each row once in one process.
    """
    for variable in variables:
        for face in (variable, getattr(variable, "_value", None)):
            if face is not None and not is_embedding_variable(face):
                object.__setattr__(face, "_sok_distribution", distribution)
                if distinct:
                    object.__setattr__(face, "_sok_distinct", True)


def completed(
    gradients: Sequence[Any],
    sources: Sequence[Any],
    distribution: Any = None,
    *,
    are_parts: bool = False,
) -> list:
    """Gradients of the whole batch: averages along the batch axis those that are not yet averaged.

    Args:
        gradients: Results of the tape, or what the program made of them.
        sources: Their sources. Only gradients of variables are averaged.
        distribution: For variables that belong to no model; by default the current one.
        are_parts: Whether gradients of sharded variables are this rank's parts, as from a tape.
    """
    result = list(gradients)
    by_line: dict[Any, list[int]] = {}
    for i, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
        of_source = distribution_of(source, distribution)
        if gradient is None or of_source is None:
            continue
        line = of_source.mesh.along(of_source.batch_dim_name)
        if line.world_size > 1 and not _is_complete(gradient, source):
            by_line.setdefault(line, []).append(i)
    for line, places in by_line.items():
        parts = [
            gradients[i] if are_parts else local_part(gradients[i], sources[i]) for i in places
        ]
        means = _means(parts, [sources[i] for i in places], line)
        for i, part, mean in zip(places, parts, means, strict=True):
            if not isinstance(mean, tf.IndexedSlices):
                mean = tf.ensure_shape(mean, part.shape)  # Horovod's ops lose the static shape
            mean._sok_complete = True
            result[i] = mean
    return result


def distribution_of(source: Any, default: Any = None) -> Any:
    """The distribution of a model's variable, otherwise the default or the current one, or None."""
    if not isinstance(source, (tf.Variable, keras.Variable)) or is_embedding_variable(source):
        return None
    mine = getattr(source, "_sok_distribution", default)
    mine = keras.distribution.distribution() if mine is None else mine
    return mine if hasattr(mine, "mesh") else None


def _is_complete(gradient, source):
    shard = shard_of(source)
    if shard is None:
        return is_local(source) or getattr(gradient, "_sok_complete", False)
    # Reading a variable that is sharded along the batch axis averages its gradient.
    return shard.over_batch or isinstance(gradient, ShardedGradient)


def _means(gradients, sources, line):
    """The mean of each gradient, a tensor or `tf.IndexedSlices`, along a line."""
    name = unique_in_graph("sok_distribution_gradients")

    def average():
        dense = [None if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        means = line.average(dense, name)
        for i, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                means[i] = _mean_of_slices(gradient, source, line, f"{name}_{i}")
        return means

    return turns.exchange_in_turn(average, name, line)


def _mean_of_slices(gradient, source, line, name):
    """The rows of all ranks: as in one process, one row per occurrence of an id in the batch."""
    values = line.all_gather(gradient.values, f"{name}_values")
    rows = line.all_gather(gradient.indices, f"{name}_rows")
    values = values / tf.cast(line.world_size, values.dtype)
    mean = tf.IndexedSlices(values, rows, gradient.dense_shape)
    return comm.distinct(mean) if getattr(source, "_sok_distinct", False) else mean


@hooks.at_init
def _install():
    why = "gradients of variables under a distribution are those of the whole batch"
    hooks.wrap(tf.GradientTape, "gradient", _gradient, why)
    # `tf.gradients` of TensorFlow 1 and 2 and `tf.hessians` all call this function.
    hooks.wrap(gradients_util, "_GradientsHelper", _gradients, why)
