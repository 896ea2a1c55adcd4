"""A variable of which this rank stores a shard, for Keras 3 and for tf_keras.

Everywhere it passes for the whole variable: its `shape` is the whole one's, reading it gathers
(a collective of the ranks along its axes), and a value assigned to it is cut. So a layer, a
regularizer or a file that knows nothing of shards is right, if not fast. Layers with a rule
(`rules.py`) read `local` instead, and optimizers work `on_shards`, where the variable passes for
its shard.
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

_mode = threading.local()


@contextlib.contextmanager
def on_shards() -> Iterator[None]:
    """Within it, sharded variables pass for their shards: for optimizers."""
    before = getattr(_mode, "on_shards", False)
    _mode.on_shards = True
    try:
        yield
    finally:
        _mode.on_shards = before


def works_on_shards() -> bool:
    """Whether `on_shards` is in force."""
    return getattr(_mode, "on_shards", False)


class Shard:
    """What a sharded variable knows of its place.

    Attributes:
        placement: Which part is here.
        mesh: The ranks.
        batch_axis: The mesh axis whose ranks hold different samples.
    """

    def __init__(self, placement: Placement, mesh: RankMesh, batch_axis: str):
        self.placement, self.mesh, self.batch_axis = placement, mesh, batch_axis

    @property
    def over_batch(self) -> bool:
        """Whether it is spread over the batch axis, so that its gradient is reduced by reading."""
        return any(cut.axis == self.batch_axis for cut in self.placement.cuts)

    def whole(self, local: tf.Tensor) -> tf.Tensor:
        """The whole value, from every rank's; its gradient goes back to the shards."""
        for cut in self.placement.cuts:
            local = gather(
                local,
                cut.dim,
                self.mesh.along(cut.axis),
                f"{self.placement.path}_dim{cut.dim}",
                length=cut.length,
                gradient="mean" if cut.axis == self.batch_axis else "own part",
            )
        return local


def shard_of(variable: Any) -> Shard | None:
    """The Shard of a sharded variable; None of any other."""
    return getattr(variable, "_sok_shard", None)


@contextlib.contextmanager
def held_whole(variables: Iterable[Any]) -> Iterator[None]:
    """Within it, reading these variables gives what was gathered at its beginning.

    For bodies of loops: rounds of one loop may run at the same time, and so would collectives of
    one name.
    """
    held = [variable for variable in variables if shard_of(variable) is not None]
    for variable in held:
        variable._sok_held = tf.convert_to_tensor(variable)
    try:
        yield
    finally:
        for variable in held:
            variable._sok_held = None


def path_of(variable: Any) -> str:
    """The path of a variable: `dense/kernel`."""
    path = getattr(variable, "path", None)
    return variable.name.removesuffix(":0") if path is None else path


def local_rows(table: Any, positions: tf.Tensor) -> tf.Tensor:
    """Rows of this rank's shard of a table, `[num_keys, local dim]`; their gradient is sparse."""
    with on_shards():
        return tf.gather(as_tf_table(table), positions)


class _Sharded:
    """What sharded variables of both Keras have."""

    _sok_shard: Shard
    _sok_held: tf.Tensor | None = None
    de_local = True  # no one averages or broadcasts it

    @property
    def layout(self) -> tuple:
        """A mesh axis or None for each dimension."""
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
        """This rank's shard, in the compute dtype where Keras casts variables."""
        with on_shards():
            return tf.convert_to_tensor(self)

    @property
    def shape(self):
        return tf.TensorShape(self.local_shape if works_on_shards() else self.global_shape)

    def __repr__(self):  # the stock ones read the value, and a print on one rank would wait for all
        return (
            f"<sharded variable path={path_of(self)}, shape={self.global_shape}, "
            f"dtype={self.dtype}, layout={self.layout}, local shape={self.local_shape}>"
        )

    __str__ = __repr__


@functools.cache
def keras_3_class() -> type:
    """The class for Keras 3, whose variables have a `tf.Variable` inside."""
    import keras

    class VariableShard(_Sharded, keras.Variable):
        """A variable spread over ranks; made from an ordinary one by the creation hook."""

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
    """The class for tf_keras, whose variables are those of TensorFlow, of class `cls`.

    It cannot be called ShardedVariable: tf_keras takes classes of that name for TensorFlow's.
    """

    class VariableShard(_Sharded, cls):
        """A variable spread over ranks; made from an ordinary one by the creation hook."""

        def _read_variable_op(self, *args, **kwargs):
            if self._sok_held is not None and not works_on_shards():
                return self._sok_held
            local = super()._read_variable_op(*args, **kwargs)
            return local if works_on_shards() else self._sok_shard.whole(local)

        def sparse_read(self, indices, name=None):
            if works_on_shards():
                return super().sparse_read(indices, name)
            return tf.gather(self.read_value(), indices)

        def _cut(self, value):
            value = tf.convert_to_tensor(value, self.dtype)
            return value if works_on_shards() else self._sok_shard.placement.take(value)

        def assign(self, value, *args, **kwargs):
            return super().assign(self._cut(value), *args, **kwargs)

        def assign_add(self, delta, *args, **kwargs):
            return super().assign_add(self._cut(delta), *args, **kwargs)

        def assign_sub(self, delta, *args, **kwargs):
            return super().assign_sub(self._cut(delta), *args, **kwargs)

    return VariableShard
