"""An EmbeddingVariable as a layer's weight, under either Keras.

tf_keras tracks a `tf.Variable` as it is. Keras 3 tracks only its own variables, so there the
EmbeddingVariable goes inside one, which passes on the handle that tapes and graphs look at.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from sok_like.table.variable import EmbeddingVariable


def is_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3; False under `TF_USE_LEGACY_KERAS=1`, where it is tf_keras."""
    return not hasattr(tf.keras, "__internal__")


def as_weight(variable: EmbeddingVariable):
    """What a layer of the running Keras should hold to have `variable` among its weights."""
    return _wrapper_class()(variable) if is_keras_3() else variable


@functools.cache
def _wrapper_class():
    import keras

    class KerasEmbeddingVariable(keras.Variable):
        """A Keras 3 variable whose value is an EmbeddingVariable."""

        def __init__(self, variable):
            self._embedding_variable = variable
            super().__init__(
                initializer=lambda *args, **kwargs: None,  # never called: see _initialize
                shape=tuple(variable.shape),
                dtype="float32",
                trainable=variable.trainable,
                autocast=False,
                name=variable.table_name.replace("/", "_"),
            )

        def _initialize_with_initializer(self, initializer):
            self._value = self._embedding_variable

        def _deferred_initialize(self):
            self._value = self._embedding_variable

        def assign(self, *args, **kwargs):
            return self._embedding_variable.assign(*args, **kwargs)

        def __getattr__(self, name):
            # What a table has and a Keras variable has not: size, stats, find, export's keys, ...
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._embedding_variable, name)

        def __repr__(self):
            return repr(self._embedding_variable)

    return KerasEmbeddingVariable
