"""An EmbeddingVariable as a layer's weight, under either Keras.

tf_keras tracks a `tf.Variable` as it is. Keras 3 tracks only its own variables, so there one of
them wraps the EmbeddingVariable, and passes on the handle that tapes and graphs look at.
"""

import functools
import weakref
from typing import Any

from tensorflow.core.function.trace_type import default_types

from sok_like.runtime.framework.running_keras import is_keras_3


def as_weight(variable: Any) -> Any:
    """The object by which a layer of the running Keras has `variable` among its weights."""
    if not is_keras_3():
        return variable
    held = getattr(variable, "_keras_variable", None)
    held = None if held is None else held()
    if held is None:
        held = _wrapper_class()(variable)
        # Weak, as it refers to `variable`. Layers that share a table list one wrapper.
        variable._keras_variable = weakref.ref(held)
    return held


@functools.cache
def holder_class():
    """The class of Keras 3 variables whose value is a given variable with a `table_name`."""
    import keras

    class HeldVariable(keras.Variable):
        """A Keras 3 variable whose value is another variable."""

        def __init__(self, variable, shape):
            self._held = variable
            super().__init__(
                initializer=lambda *args, **kwargs: None,  # never called: see _initialize
                shape=shape,
                dtype=variable.dtype.name,
                trainable=variable.trainable,
                autocast=False,
                name=variable.table_name.replace("/", "_"),
            )

        def _initialize_with_initializer(self, initializer):
            self._value = self._held

        def _deferred_initialize(self):
            self._value = self._held

    return HeldVariable


@functools.cache
def _wrapper_class():
    class KerasEmbeddingVariable(holder_class()):
        """A Keras 3 variable whose value is an EmbeddingVariable."""

        def __init__(self, variable):
            self._embedding_variable = variable
            super().__init__(variable, (0, variable.dim))

        @property
        def shape(self):
            return self._embedding_variable.shape

        def assign(self, value):
            self._embedding_variable.assign(value)
            return value

        def __tf_tracing_type__(self, context):
            # tf.function would otherwise convert its argument to an array, which raises.
            return default_types.Weakref(weakref.ref(self))

        __reversed__ = None

        def __eq__(self, other):
            return self is other

        __ne__, __hash__ = object.__ne__, object.__hash__

        def __getattr__(self, name):
            # Attributes of a table that a Keras variable does not have: size, stats, find, ...
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._embedding_variable, name)

    # Without `__iter__`, Python would ask for rows 0, 1, 2, ... forever.
    special = ("__array__", "__iter__", "__len__", "__contains__", "__repr__")
    for name in (*special, "assign_add", "assign_sub"):
        setattr(KerasEmbeddingVariable, name, _of_the_table(name))
    return KerasEmbeddingVariable


def _of_the_table(name):
    def method(self, *args, **kwargs):
        return getattr(self._embedding_variable, name)(*args, **kwargs)

    return method
