"""What layers over one hash table share: the table and the compute dtype."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.lookup.training_flag import by_training
from sok_like.table.variable import EmbeddingVariable


class TableLayer(tf.keras.layers.Layer):
    """A layer over one table; a subclass sets `_weight`."""

    _weight: Any  # no value here: tf_keras does not track attributes that the class has

    @property
    def embedding_variable(self) -> Any:
        """The layer's EmbeddingVariable, as it is in its `trainable_variables`.

        Raises:
            RuntimeError: the layer is not built.
        """
        if "_weight" not in vars(self):
            raise RuntimeError(
                f"A {type(self).__name__} has its table once it is built: call the layer, or its "
                f"`build()`, first. Received: layer '{self.name}', which is not built"
            )
        return self._weight

    @property
    def table(self) -> EmbeddingVariable:
        """The EmbeddingVariable itself, under either Keras. RuntimeError before it is built."""
        weight = self.embedding_variable
        return getattr(weight, "_embedding_variable", weight)

    @classmethod
    def from_config(cls, config):
        try:
            return super().from_config(config)
        except TypeError as error:
            # Keras prints the whole configuration first, again at each level of a model, and the
            # cause last. It passes on a ValueError unchanged.
            cause = error.__context__ or error
            raise ValueError(
                f"{cls.__name__} '{config.get('name')}' cannot be made from its configuration: "
                f"{cause}"
            ) from cause

    def run(self, training: Any, lookup: Any) -> Any:
        """`lookup(training)` with a Python bool, in the layer's compute dtype."""
        return self.as_output(by_training(training, lookup))

    def as_output(self, rows: Any) -> Any:
        """Rows in the layer's compute dtype; they have no gradient while the layer is frozen."""
        # Keras 2 has no compute dtype after `tf.disable_v2_behavior()`.
        return tf.cast(unless_frozen(self, rows), self.compute_dtype or tf.float32)


def freeze_tables(layer: Any) -> None:
    """Freezes the tables of a layer made with `trainable=False`, as Keras sees them.

    The tables themselves are trainable, so the layer trains them once its `trainable` is True.
    """
    if not layer.trainable:
        # Includes inner layers. A plain assignment of the present value would have no effect.
        tf.keras.layers.Layer.trainable.fset(layer, False)


def unless_frozen(layer: Any, rows: Any) -> Any:
    """The rows; they have no gradient while the layer's `trainable` is False."""
    return rows if layer.trainable else tf.nest.map_structure(tf.stop_gradient, rows)


def keras_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keras' own arguments of a layer; not `weights`, as tables exist before tf_keras sets them."""
    if "weights" in kwargs:
        raise TypeError(
            "`weights` is not an argument of layers over hash tables: rows have keys. "
            "`sok.assign(layer.embedding_variable, keys, rows)` sets rows that were trained "
            f"elsewhere. Received: weights=... (layer {kwargs.get('name')!r})"
        )
    return kwargs
