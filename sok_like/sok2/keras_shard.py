"""A `Variable` as a layer's weight under Keras 3, which tracks only its own variables."""

from __future__ import annotations

import functools

from sok_like.lookup.local_variables import mark_local


@functools.cache
def keras_class():
    """The class of Keras 3 variables that hold a `Variable`."""
    import keras

    class KerasShardedVariable(keras.Variable):
        """A Keras 3 variable whose value is a `Variable`."""

        def __init__(self, variable):
            self._given = variable
            super().__init__(
                initializer=lambda *args, **kwargs: None,  # never called
                shape=tuple(variable.shape),
                dtype=variable.dtype.name,
                trainable=variable.trainable,
                autocast=False,
                name=variable.table_name.replace("/", "_"),
            )
            mark_local(self)

        def _initialize_with_initializer(self, initializer):
            self._value = self._given

        def _deferred_initialize(self):
            self._value = self._given

    return KerasShardedVariable
