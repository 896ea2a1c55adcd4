"""A variable of which this rank stores one shard, for Keras 3 and for tf_keras.

It behaves like the whole variable: its `shape` is that of the whole, reading it gathers (a
collective of the ranks along its axes), and assigning keeps this rank's shard. So code that does
not know about shards is right, if slow. Layers with a rule (`rules.py`) read `local` instead.
Optimizers work inside `on_shards`, where the variable behaves like its shard.

TensorFlow calls the active variable creators for each new variable. Ours finds the path of the
variable (under Keras 3 from the Keras variable behind the request). If the layout map has a layout
for it, only this rank's shard is created. The initial value is computed whole, as in the unsharded
model, then sharded and freed, one variable at a time.
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from sok_like.distribution.mesh import Shard
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.exporting import Spread
from sok_like.runtime.checks import unmet
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.table.variable import is_embedding_variable

_mode = threading.local()


def on_shards() -> contextlib.AbstractContextManager[None]:
    """A scope in which sharded variables behave like their shards, for optimizers."""
    return attributes(_mode, {"on_shards": True})


def works_on_shards() -> bool:
    return getattr(_mode, "on_shards", False)


def raise_for_saved_model(why: str, received: str, *args: Any, **kwargs: Any) -> None:
    """Raises ValueError, in place of what would write a SavedModel."""
    raise ValueError(
        f"{why}; use `sok.export_saved_model(model, path)`, or save the weights and export a model "
        f"that was made without a distribution. Received: {received}"
    )


def shard_of(variable: Any) -> Shard | None:
    """The Shard of a sharded variable; None for any other variable."""
    return getattr(variable, "_sok_shard", None)


@contextlib.contextmanager
def held_whole(variables: Iterable[Any]) -> Iterator[None]:
    """A scope that gathers these variables once, as iterations of a loop may run at one time."""
    with contextlib.ExitStack() as scopes:
        for variable in variables:
            inner = getattr(variable, "_value", variable)  # of a variable of Keras 3
            if shard_of(inner) is not None and inner._sok_held is None:
                whole = tf.convert_to_tensor(inner)
                scopes.enter_context(attributes(inner, {"_sok_held": whole}))
        yield


def path_of(variable: Any) -> str:
    """The path of a variable: `dense/kernel`."""
    path = getattr(variable, "path", None)
    return variable.name.removesuffix(":0") if path is None else path


def local_rows(table: Any, positions: tf.Tensor) -> tf.Tensor:
    """Rows of this rank's shard of a table, `[num_keys, local dim]`; their gradient is sparse."""
    with on_shards():
        return tf.gather(as_tf_table(table), positions)


class _Sharded:
    """The common part of sharded variables of Keras 3 and tf_keras."""

    _sok_shard: Shard
    _sok_held: tf.Tensor | tf.Variable | None = None
    _sok_in_function = False  # whether a tf.function has made it
    de_local = True  # neither averaged nor broadcast

    @property
    def layout(self) -> tuple:
        """One mesh axis or None per dimension."""
        return self._sok_shard.layout

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return self._sok_shard.global_shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self._sok_shard.local_shape

    @property
    def local(self) -> tf.Tensor:
        """This rank's shard, in the compute dtype if Keras casts variables."""
        with on_shards():
            return tf.convert_to_tensor(self)

    @property
    def shape(self):
        return tf.TensorShape(self.local_shape if works_on_shards() else self.global_shape)

    def spread_for_export(self) -> Spread:
        """It, as `sok.export_saved_model` writes it."""
        with on_shards():
            dtype = as_tf_table(self).dtype.base_dtype
        shard = self._sok_shard
        # Ranks that differ along other axes hold the same.
        is_first = not any(at for axis, at in shard.mesh.index.items() if axis not in shard.axes)
        num_rows = self.local_shape[0] if is_first and all(self.local_shape) else 0
        begin = shard.place.begin
        return Spread(
            self.global_shape, dtype, begin, num_rows, lambda a, b: local_rows(self, tf.range(a, b))
        )

    def _export_to_saved_model_graph(self, *args, **kwargs):
        raise_for_saved_model(
            "A SavedModel would hold one rank's shard of a variable", path_of(self)
        )

    # tf.train.Checkpoint writes and reads the whole value, so its files fit any number of ranks.

    def _serialize_to_tensors(self):
        with tf.device("/CPU:0"):
            return {"VARIABLE_VALUE": tf.identity(tf.convert_to_tensor(self))}

    def _restore_from_tensors(self, restored_tensors):
        return self.assign(restored_tensors["VARIABLE_VALUE"])

    def __repr__(self):  # stock ones read the value: a print on one rank would wait for the others
        return (
            f"<sharded variable path={path_of(self)}, shape={self.global_shape}, "
            f"dtype={self.dtype}, layout={self.layout}, local shape={self.local_shape}>"
        )

    __str__ = __repr__


class VariableShard(_Sharded, keras.Variable):
    """For Keras 3, around TensorFlow's variable of `tf_class`, which does the work."""


@functools.cache
def tf_class(cls: type) -> type:
    """The class for variables of TensorFlow, of class `cls`, which are also those of tf_keras."""

    class VariableShard(_Sharded, cls):
        # Not ShardedVariable: tf_keras takes classes of that name for TensorFlow's.
        @property
        def _handle(self):
            # TensorFlow's eager ops find a tensor's variable by this name and bypass
            # `_read_variable_op`; they would take the shard for the whole.
            return vars(self)["_handle"] if works_on_shards() else None

        @_handle.setter
        def _handle(self, handle):
            vars(self)["_handle"] = handle

        @property
        def handle(self):
            # A lookup is placed beside its table, so a SavedModel's graph has the handle.
            if isinstance(self._sok_held, tf.Variable) and not works_on_shards():
                return self._sok_held.handle
            return vars(self)["_handle"]

        def _read_variable_op(self, *args, **kwargs):
            if self._sok_held is not None and not works_on_shards():
                return tf.convert_to_tensor(self._sok_held)
            local = super()._read_variable_op(*args, **kwargs)
            return local if works_on_shards() else self._sok_shard.whole(local)

        def sparse_read(self, indices, name=None):
            if works_on_shards():
                return super().sparse_read(indices, name)
            return tf.gather(self.read_value(), indices)

        def _own(self, value):
            value = tf.convert_to_tensor(value, self.dtype)
            # A tf.function gives the variables that it makes their first values at its end.
            is_first = self._sok_in_function and not tf.executing_eagerly()
            if works_on_shards() or (is_first and value.shape == self.local_shape):
                return value
            if not value.shape.is_compatible_with(self.global_shape):
                required = f"have the shape of the whole variable, {self.global_shape}"
                raise unmet(f"A value of '{path_of(self)}'", required, value.shape)
            return self._sok_shard.take(tf.ensure_shape(value, self.global_shape))

        def assign(self, value, *args, **kwargs):
            return super().assign(self._own(value), *args, **kwargs)

        def assign_add(self, delta, *args, **kwargs):
            return super().assign_add(self._own(delta), *args, **kwargs)

        def assign_sub(self, delta, *args, **kwargs):
            return super().assign_sub(self._own(delta), *args, **kwargs)

    return VariableShard


def create(distribution: Any, next_creator: Any, **kwargs: Any) -> Any:
    """For `tf.variable_creator_scope`: a variable; of one in the layout map this rank's shard."""
    variable, path, shape = _requested(kwargs)
    if works_on_shards() or (variable is None and is_keras_3()):
        return next_creator(**kwargs)
    # Within an optimizer, whose paths contain a model's, a metric or a seed generator.
    stack = global_state.get_global_attribute("name_scope_stack") if is_keras_3() else None
    others = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)
    of_layer = not any(isinstance(scope.caller, others) for scope in stack or ())
    shard = None
    if of_layer and shape is not None and tf.TensorShape(shape).is_fully_defined():
        shard = _shard_by_layout(variable, path, shape, distribution)
    if shard is None:
        return next_creator(**kwargs)
    if variable is not None:
        make_sharded(variable, shard)
    whole = kwargs.get("initial_value")
    # `tf.compat.v1` variables may come without a dtype.
    kwargs["dtype"] = dtype = kwargs.get("dtype") or getattr(whole, "dtype", tf.float32)

    def initial_value():
        return shard.take(tf.cast(whole() if callable(whole) else whole, dtype))

    kwargs["initial_value"], kwargs["shape"] = initial_value, shard.local_shape
    local = next_creator(**kwargs)
    make_sharded(local, shard)
    return local


def cut_existing(variable: Any, distribution: Any) -> None:
    """Shards a Keras variable that was created before the distribution was set."""
    if not isinstance(variable, keras.Variable) or variable._value is None:
        return  # tf_keras' layers hold TensorFlow's variables, which cannot be replaced
    if shard_of(variable) is None and not is_embedding_variable(variable):
        shard = _shard_by_layout(variable, variable.path, variable.shape, distribution)
        if shard is not None:
            with tf.init_scope():
                part = tf.convert_to_tensor(shard.take(tf.convert_to_tensor(variable)))
                local = tf.Variable(part, trainable=variable.trainable, name=variable.name)
                variable._value = local
                make_sharded(variable, shard)


def make_sharded(variable: Any, shard: Shard) -> None:
    """Turns a variable that has, or will have, a shard's value into a sharded variable."""
    if isinstance(variable, keras.Variable):
        variable.__class__ = VariableShard
        if getattr(variable, "_value", None) is not None:
            make_sharded(variable._value, shard)
    else:
        variable.__class__ = tf_class(type(variable))  # type: ignore[arg-type]
        variable._sok_in_function = not tf.executing_eagerly()
    variable._sok_shard = shard


def _requested(kwargs):
    """The variable of Keras 3 that requests one, or None; the path and shape that it will have."""
    initial_value, shape = kwargs.get("initial_value"), kwargs.get("shape")
    # The initializer of a variable of Keras 3 is a closure over it.
    closure = getattr(initial_value, "__closure__", None) if is_keras_3() else None
    for variable in (cell.cell_contents for cell in closure or ()):
        if isinstance(variable, keras.Variable):
            return variable, variable.path, variable._shape
    scope, name = tf.get_current_name_scope(), kwargs.get("name") or ""
    shape = getattr(initial_value, "shape", None) if shape is None else shape
    return None, f"{scope}/{name}" if scope else name, shape


def _shard_by_layout(variable, path, shape, distribution):
    """The shard by the layout given to a variable, or else by the layout map; or None."""
    layout = getattr(variable, "_layout", None)
    try:
        axes = distribution.axes_of(path) if layout is None else layout.axes
    except ValueError as error:  # several keys match
        raise ValueError(f"{error}, of shape {tuple(shape)}") from error
    if axes is None:
        return None
    shard = Shard(path, shape, axes, distribution.mesh, distribution.batch_dim_name)
    return shard if shard.cuts else None
