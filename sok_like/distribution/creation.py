"""Variables become shards while they are made.

TensorFlow asks the variable creators in force for each variable. Ours finds the Keras variable
behind the request, and if the layout map has a layout for its path, hands on a request for this
rank's part only. The initial value is computed whole, since that is what the unsharded model has,
cut and dropped: one variable at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from sok_like.distribution.placement import Placement
from sok_like.distribution.sharded_variable import (
    Shard,
    shard_of,
    sharded_variable_class,
    works_on_shards,
)
from sok_like.variable import is_embedding_variable

_next_slot = threading.local()


def creator(distribution: Any) -> Any:
    """A function for `tf.variable_creator_scope`."""

    def create(next_creator, **kwargs):
        variable = _keras_variable(kwargs.get("initial_value"))
        shard = None if variable is None else _shard_for(variable, distribution)
        if shard is None:
            return next_creator(**kwargs)
        make_sharded(variable, shard)
        whole, dtype = kwargs["initial_value"], kwargs.get("dtype")

        def initial_value():
            value = tf.cast(whole(), dtype)
            return value if works_on_shards() else shard.placement.take(value)

        made = next_creator(
            **{**kwargs, "initial_value": initial_value, "shape": shard.placement.local_shape}
        )
        made.de_local = True
        return made

    return create


@contextlib.contextmanager
def slots_like(reference: Any) -> Iterator[None]:
    """Within it and `on_shards`, variables that an optimizer makes lie as `reference` does."""
    _next_slot.shard = shard_of(reference)
    try:
        yield
    finally:
        _next_slot.shard = None


def cut_existing(variable: Any, distribution: Any) -> None:
    """Makes a shard of a Keras variable that was made without the distribution."""
    if not isinstance(variable, keras.Variable) or variable._value is None:
        return
    if shard_of(variable) is None and not is_embedding_variable(variable):
        shard = _shard_by_path(variable, distribution)
        if shard is not None:
            with tf.init_scope():
                part = tf.convert_to_tensor(shard.placement.take(tf.convert_to_tensor(variable)))
                local = tf.Variable(part, trainable=variable.trainable, name=variable.name)
            local.de_local = True
            variable._value = local
            make_sharded(variable, shard)


def make_sharded(variable: Any, shard: Shard) -> None:
    """Turns a Keras variable without a value into a sharded one."""
    variable.__class__ = sharded_variable_class()
    variable._sok_shard = shard


def _keras_variable(initial_value):
    """The Keras variable that asks for a value: its initializer is a closure over itself."""
    for cell in getattr(initial_value, "__closure__", None) or ():
        if isinstance(cell.cell_contents, keras.Variable):
            return cell.cell_contents
    return None


def _shard_for(variable, distribution):
    slot = getattr(_next_slot, "shard", None)
    if slot is not None:
        return slot if tuple(variable._shape) == slot.placement.local_shape else None
    if shard_of(variable) is not None or not _is_of_a_layer():
        return None
    return _shard_by_path(variable, distribution)


def _shard_by_path(variable, distribution):
    axes = distribution.axes_of(variable.path, len(variable._shape))
    if axes is None:
        return None
    mesh = distribution.mesh
    placement = Placement(variable.path, variable._shape, axes, mesh.shape, mesh.index)
    return Shard(placement, mesh, distribution.batch_dim_name) if placement.cuts else None


def _is_of_a_layer():
    """Whether no optimizer, metric or seed generator is making the variable.

    An optimizer's variables have paths that contain those of the model's.
    """
    stack = global_state.get_global_attribute("name_scope_stack") or []
    others = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)
    return not any(isinstance(scope.caller, others) for scope in stack)
