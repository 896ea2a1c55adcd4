"""Stock optimizers on shards: gradients averaged along the batch axis, local slot variables."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.gradients import slot_reference
from sok_like.distribution.creation import slots_like
from sok_like.distribution.sharded_variable import on_shards, path_of, shard_of
from sok_like.lookup.local_variables import is_local, unique_in_graph
from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.runtime import turns

# These update each element of a variable independently, so they can work on a shard.
_STOCK = ("keras.src", "tf_keras.src")
_ELEMENTWISE = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
)


class _OnShards:
    """Mixed into a stock optimizer of either Keras, before `embedding_aware`'s mixin."""

    _sok_distribution: Any = None

    def build(self, variables):
        shards = [variable for variable in variables if shard_of(variable) is not None]
        sharded = [path_of(variable) for variable in shards]
        for option in ("clipnorm", "global_clipnorm"):
            if sharded and getattr(self, option, None) is not None:
                raise ValueError(
                    f"`{option}` needs the norm of whole gradients, which no rank has; use "
                    f"`clipvalue`. Received: {option}={getattr(self, option)!r} with the sharded "
                    f"variables {sharded}"
                )
        for variable in shards:
            constraint = getattr(variable, "constraint", None)
            if constraint is not None and type(constraint).__name__ != "NonNeg":
                raise ValueError(
                    "A constraint other than NonNeg needs the whole variable, which no rank has. "
                    f"Received: {type(constraint).__name__} on the sharded '{path_of(variable)}'"
                )
        with on_shards():
            super().build(variables)

    def add_variable_from_reference(self, *args, **kwargs):
        with slots_like(slot_reference(args, kwargs)):
            return super().add_variable_from_reference(*args, **kwargs)

    def apply(self, grads, trainable_variables=None):  # Keras 3
        with on_shards():
            super().apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        with on_shards():
            return super().apply_gradients(grads_and_vars, *args, **kwargs)

    def finalize_variable_values(self, var_list):
        with on_shards():
            super().finalize_variable_values(var_list)

    def _var_key(self, variable):
        with on_shards():
            return super()._var_key(variable)

    def _sok_averaged(self, pairs, learning_rate, step):
        pairs = [(g, v) for g, v in pairs if g is not None]
        distribution = self._sok_distribution
        line = distribution.mesh.along(distribution.batch_dim_name)
        if line.world_size == 1:
            return pairs
        # Gradients of local variables are complete: reading a shard along the batch axis averages
        # them, and hash tables are sharded over all ranks.
        own = [is_local(v) and (shard_of(v) is None or shard_of(v).over_batch) for _, v in pairs]
        mine = [None if o else g for (g, _), o in zip(pairs, own, strict=True)]
        name = unique_in_graph("sok_distribution_gradients")
        means = turns.in_turn(lambda: line.average(mine, name), name, line)
        return [(g if o else mean, v) for (g, v), o, mean in zip(pairs, own, means, strict=True)]


@functools.cache
def _class_on_shards(cls):
    aware = embedding_aware(cls)
    stock = next(base for base in aware.__mro__ if base.__module__.startswith(_STOCK))
    # The stock name, so that files and `get_config` are those of the stock optimizer.
    return type(stock.__name__, (_OnShards, aware), {"__module__": stock.__module__})


def distributed_optimizer(optimizer: Any, distribution: Any) -> Any:
    """A view of a stock optimizer that trains sharded variables; both share all state.

    Args:
        optimizer: A Keras optimizer that updates each element independently (SGD, RMSprop, Adam,
            AdamW, Adadelta, Adagrad, Adamax, Nadam, Ftrl, Lion).
        distribution: A `ModelParallel` or `DataParallel`.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer.
        ValueError: the optimizer needs whole variables, or scales the loss.
    """
    if isinstance(optimizer, _OnShards):
        return optimizer
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise TypeError(
            f"A Keras optimizer is required. Received: {optimizer!r} of type {type(optimizer)}"
        )
    cls = type(optimizer)
    names = {base.__name__ for base in cls.__mro__}
    if not names & set(_ELEMENTWISE):
        raise ValueError(
            "Under a distribution the optimizer must update each element of a variable "
            f"independently ({', '.join(_ELEMENTWISE)}). Received: {cls.__name__}, which needs "
            "whole variables or scales the loss (use mixed_bfloat16 instead of mixed_float16)"
        )
    view = object.__new__(_class_on_shards(cls))  # type: ignore[arg-type]
    # Not by the optimizer's __setattr__, which would track the dictionary as state to save.
    object.__setattr__(view, "__dict__", optimizer.__dict__)
    view.__dict__["_sok_distribution"] = distribution
    return view
