"""Shards variables when they are created.

TensorFlow calls the active variable creators for each new variable. Ours finds the path of the
variable (under Keras 3 from the Keras variable behind the request). If the layout map has a layout
for it, only this rank's shard is created. The initial value is computed whole, as in the unsharded
model, then sharded and freed, one variable at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from sok_like.distribution.placement import Placement
from sok_like.distribution.sharded_variable import (
    Shard,
    keras_3_class,
    shard_of,
    tf_class,
    works_on_shards,
)
from sok_like.runtime.keras_version import is_keras_3
from sok_like.table.variable import is_embedding_variable


def creator(distribution: Any) -> Any:
    """A function for `tf.variable_creator_scope`."""

    def create(next_creator, **kwargs):
        if works_on_shards():  # an optimizer makes it, see `slots_like`
            return next_creator(**kwargs)
        variable = _keras_variable_of(kwargs)
        if variable is not None:
            layout = getattr(variable, "_layout", None)
            shard = _shard_for(variable.path, variable._shape, distribution, layout)
        elif not is_keras_3():
            shard = _shard_for(_tf_path(kwargs), _tf_shape(kwargs), distribution)
        else:
            shard = None
        return next_creator(**kwargs) if shard is None else _made(shard, next_creator, kwargs)

    return create


def _made(shard, next_creator, kwargs):
    """Makes a variable with this rank's shard."""
    variable, whole = _keras_variable_of(kwargs), kwargs.get("initial_value")
    if variable is not None:
        make_sharded(variable, shard)

    def initial_value():
        value = tf.cast(whole() if callable(whole) else whole, kwargs["dtype"])
        return value if works_on_shards() else shard.placement.take(value)

    # `tf.compat.v1` variables may come without a dtype.
    kwargs["dtype"] = kwargs.get("dtype") or getattr(whole, "dtype", tf.float32)
    made = next_creator(
        **{**kwargs, "initial_value": initial_value, "shape": shard.placement.local_shape}
    )
    made.de_local = True
    if variable is None:
        make_sharded(made, shard)
    return made


@contextlib.contextmanager
def slots_like(reference: Any) -> Iterator[None]:
    """A scope in which slot variables, created `on_shards`, are sharded like `reference`.

    The distribution itself need not be active: a model is often trained after its `scope`.
    """
    shard = shard_of(reference)
    if shard is None:
        yield
        return

    def create(next_creator, **kwargs):
        variable = _keras_variable_of(kwargs)
        shape = _tf_shape(kwargs) if variable is None else variable._shape
        if shape is None or tuple(shape) != shard.placement.local_shape:
            return next_creator(**kwargs)
        return _made(shard, next_creator, kwargs)

    with tf.variable_creator_scope(create):
        yield


def cut_existing(variable: Any, distribution: Any) -> None:
    """Shards a Keras variable that was created before the distribution was set."""
    if not isinstance(variable, keras.Variable) or variable._value is None:
        return  # tf_keras' layers hold TensorFlow's variables, which cannot be replaced
    if shard_of(variable) is None and not is_embedding_variable(variable):
        layout = getattr(variable, "_layout", None)
        shard = _shard_by_path(variable.path, variable.shape, distribution, layout)
        if shard is not None:
            with tf.init_scope():
                part = tf.convert_to_tensor(shard.placement.take(tf.convert_to_tensor(variable)))
                local = tf.Variable(part, trainable=variable.trainable, name=variable.name)
            local.de_local = True
            variable._value = local
            make_sharded(variable, shard)


def make_sharded(variable: Any, shard: Shard) -> None:
    """Turns a variable that has, or will have, a shard's value into a sharded variable."""
    variable.__class__ = keras_3_class() if is_keras_3() else tf_class(type(variable))  # type: ignore[arg-type]
    variable._sok_shard = shard


def _keras_variable_of(kwargs):
    """The variable of Keras 3 that requests one: its initializer is a closure over it."""
    initial_value = kwargs.get("initial_value") if is_keras_3() else None
    for cell in getattr(initial_value, "__closure__", None) or ():
        if isinstance(cell.cell_contents, keras.Variable):
            return cell.cell_contents
    return None


def _tf_path(kwargs):
    """The name, without a colon, that a `tf.Variable` will get."""
    scope, name = tf.get_current_name_scope(), kwargs.get("name") or ""
    return f"{scope}/{name}" if scope else name


def _tf_shape(kwargs):
    shape = kwargs.get("shape")
    return getattr(kwargs.get("initial_value"), "shape", None) if shape is None else shape


def _shard_for(path, shape, distribution, layout=None):
    if shape is None or not tf.TensorShape(shape).is_fully_defined() or not _is_of_a_layer():
        return None
    return _shard_by_path(path, shape, distribution, layout)


def _shard_by_path(path, shape, distribution, layout=None):
    """The shard, by the layout given to the variable, or else by the layout map."""
    try:
        axes = distribution.axes_of(path) if layout is None else layout.axes
    except ValueError as error:  # several keys match
        raise ValueError(f"{error}, of shape {tuple(shape)}") from error
    if axes is None:
        return None
    mesh = distribution.mesh
    placement = Placement(path, shape, axes, mesh.shape, mesh.index)
    return Shard(placement, mesh, distribution.batch_dim_name) if placement.cuts else None


def _is_of_a_layer():
    """False if an optimizer, metric or seed generator of Keras 3 is creating the variable.

    An optimizer's variables have paths that contain those of the model's.
    """
    if not is_keras_3():
        return True
    stack = global_state.get_global_attribute("name_scope_stack") or []
    others = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)
    return not any(isinstance(scope.caller, others) for scope in stack)
