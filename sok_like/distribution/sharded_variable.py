"""A variable of which this rank stores one shard, for Keras 3 and for tf_keras.

It behaves like the whole variable: its `shape` is that of the whole, reading it gathers (a
collective of the ranks along its axes), and assigning keeps this rank's shard. So code that does
not know about shards is right, if slow. Layers with a rule (`rules.py`) read `local` instead.
Optimizers work inside `on_shards`, where the variable behaves like its shard.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.distribution.collectives import gather
from sok_like.distribution.mesh import RankMesh
from sok_like.distribution.placement import Placement
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.exporting import Spread
from sok_like.runtime.attributes import attributes

_mode = threading.local()


def on_shards() -> contextlib.AbstractContextManager[None]:
    """A scope in which sharded variables behave like their shards, for optimizers."""
    return attributes(_mode, {"on_shards": True})


def works_on_shards() -> bool:
    """Whether `on_shards` is active."""
    return getattr(_mode, "on_shards", False)


class Shard:
    """How a variable is sharded.

    Attributes:
        placement: Which shard is on this rank.
        mesh: The ranks.
        batch_axis: The mesh axis whose ranks hold different samples.
        key: The name by which its gradients refer to it; None before the first gradient.
    """

    key: str | None = None

    def __init__(self, placement: Placement, mesh: RankMesh, batch_axis: str):
        self.placement, self.mesh, self.batch_axis = placement, mesh, batch_axis

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it is sharded."""
        return tuple(cut.axis for cut in self.placement.cuts)

    @property
    def over_batch(self) -> bool:
        """Whether it is sharded along the batch axis, so that reading it reduces its gradient."""
        return self.batch_axis in self.axes

    def whole(self, local: tf.Tensor) -> tf.Tensor:
        """Gathers the whole value from the ranks; its gradient goes back to the shards."""
        for cut in self.placement.cuts:
            line, name = self.mesh.along(cut.axis), f"{self.placement.path}_dim{cut.dim}"
            gradient = "mean" if cut.axis == self.batch_axis else 1.0
            local = gather(local, cut.dim, line, name, gradient)
        return tf.ensure_shape(local, self.placement.global_shape)


def shard_of(variable: Any) -> Shard | None:
    """The Shard of a sharded variable; None for any other variable."""
    return getattr(variable, "_sok_shard", None)


@contextlib.contextmanager
def held_whole(variables: Iterable[Any]) -> Iterator[None]:
    """A scope that gathers these variables once; reading them inside it returns that value.

    For loop bodies: iterations of a loop may run at the same time, and so could collectives of
    the same name.
    """
    held = [v for v in variables if shard_of(v) is not None and v._sok_held is None]
    for variable in held:
        variable._sok_held = tf.convert_to_tensor(variable)
    try:
        yield
    finally:
        for variable in held:
            variable._sok_held = None


def refuse_saved_model(variable: Any) -> None:
    """Raises ValueError: a SavedModel would hold the shard of one rank."""
    raise ValueError(
        "A SavedModel would hold one rank's shard of a sharded variable; use "
        "`sok.export_saved_model(model, path)`, or save the weights and export a model that was "
        f"made without a distribution. Received: '{path_of(variable)}'"
    )


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
    de_local = True  # neither averaged nor broadcast

    @property
    def layout(self) -> tuple:
        """One mesh axis or None per dimension."""
        return self._sok_shard.placement.axes

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return self._sok_shard.placement.global_shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self._sok_shard.placement.local_shape

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
        begin = [each.start or 0 for each in shard.placement.slices]
        # Ranks that differ along other axes hold the same.
        is_first = not any(at for axis, at in shard.mesh.index.items() if axis not in shard.axes)
        num_rows = self.local_shape[0] if is_first and all(self.local_shape) else 0

        def read(start, stop):
            return local_rows(self, tf.range(start, stop))

        return Spread(self.global_shape, dtype, begin, num_rows, read)

    def _export_to_saved_model_graph(self, *args, **kwargs):
        refuse_saved_model(self)

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


@functools.cache
def keras_3_class() -> type:
    """The class for Keras 3, whose variables contain a `tf.Variable`."""
    import keras

    class VariableShard(_Sharded, keras.Variable):
        """A variable sharded over ranks; the variable creator makes it from an ordinary one."""

        @property
        def value(self):
            local = super().value
            if works_on_shards():
                return local
            if self._sok_held is not None:
                return self._maybe_autocast(self._sok_held)
            return self._sok_shard.whole(tf.convert_to_tensor(local))

        @property
        def handle(self):
            return self._value.handle

        @property
        def _shared_name(self):  # for tf.train.Checkpoint
            return self._value._shared_name

        def numpy(self):
            return self.value.numpy()

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.value, dtype)

        def _direct_assign(self, value):
            if not works_on_shards():
                value = self._sok_shard.placement.take(value)
            self._value.assign(tf.cast(value, self._value.dtype))

    return VariableShard


@functools.cache
def tf_class(cls: type) -> type:
    """The class for tf_keras, whose variables are TensorFlow's, of class `cls`.

    It cannot be called ShardedVariable: tf_keras takes classes of that name for TensorFlow's.
    """

    class VariableShard(_Sharded, cls):
        """A variable sharded over ranks; the variable creator makes it from an ordinary one."""

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
            return value if works_on_shards() else self._sok_shard.placement.take(value)

        def assign(self, value, *args, **kwargs):
            return super().assign(self._own(value), *args, **kwargs)

        def assign_add(self, delta, *args, **kwargs):
            return super().assign_add(self._own(delta), *args, **kwargs)

        def assign_sub(self, delta, *args, **kwargs):
            return super().assign_sub(self._own(delta), *args, **kwargs)

    return VariableShard
