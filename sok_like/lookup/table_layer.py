"""What layers of the front doors share: their configuration, table and compute dtype."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.keras_call import by_training
from sok_like.table.variable import EmbeddingVariable


class ConfiguredLayer(tf.keras.layers.Layer):
    """A layer whose configuration are its arguments `_arguments`, attributes of the same names."""

    _arguments: tuple[str, ...] = ()

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # XLA cannot compile the tables' ops, nor shapes that depend on values, such as the number
        # of unique ids. Keras 3 checks this first.
        self.supports_jit = False

    def build(self, input_shape=None):
        # The variables exist since the construction.
        self.built = True

    def get_config(self):
        own = {name: in_config(name, getattr(self, name)) for name in self._arguments}
        return {**super().get_config(), **own}


def in_config(argument: str, value: Any) -> Any:
    """An argument's value in a configuration: initializers and their like, and dtypes, by name."""
    kind = argument.rpartition("_")[2]
    if kind in ("initializer", "regularizer", "constraint"):
        return getattr(tf.keras, f"{kind}s").serialize(value)
    return value.name if isinstance(value, tf.DType) else value


class TablesLayer(ConfiguredLayer):
    """A layer over hash tables, which a subclass makes."""

    gradient_scale: str
    wire_dtype: str | None

    def __init__(self, **kwargs: Any):
        if "weights" in kwargs:  # tables exist before tf_keras sets them
            raise TypeError(
                "`weights` is not an argument of layers over hash tables: rows have keys. "
                "`sok.assign(layer.embedding_variable, keys, rows)` sets rows that were trained "
                f"elsewhere. Received: weights=... (layer {kwargs.get('name')!r})"
            )
        super().__init__(**kwargs)

    def _freeze_tables(self) -> None:
        """Freezes the tables of a layer with `trainable=False`, until that is True."""
        if not self.trainable:
            # Includes inner layers. A plain assignment of the present value would have no effect.
            tf.keras.layers.Layer.trainable.fset(self, False)

    def look_up(self, training: Any, features: Sequence[HashFeature]) -> list[tf.Tensor]:
        """Rows of features, with the `training` flag of a Keras call."""
        options = {"gradient_scale": self.gradient_scale, "wire_dtype": self.wire_dtype}

        def rows(training):
            return lookup(features, training=training, name=self.name, **options)

        return by_training(training, rows)

    def as_output(self, rows: Any) -> Any:
        """Rows in the layer's compute dtype; they have no gradient while the layer is frozen."""
        rows = rows if self.trainable else tf.nest.map_structure(tf.stop_gradient, rows)
        # Keras 2 has no compute dtype after `tf.disable_v2_behavior()`.
        return tf.cast(rows, self.compute_dtype or tf.float32)


class TableLayer(TablesLayer):
    """A layer over one table; a subclass sets `_weight`."""

    _weight: Any  # no value here: tf_keras does not track attributes that the class has

    def _make_table(self, dim: int, **options: Any) -> None:
        """Makes the table, which has the layer's name."""
        self._weight = EmbeddingVariable(dim, name=self.name, **options).as_weight()
        self._freeze_tables()

    @property
    def embedding_variable(self) -> Any:
        """The EmbeddingVariable, as it is in `trainable_variables`; RuntimeError before `build`."""
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
