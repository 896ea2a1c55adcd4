"""`sok.get_embedding`: layers by name; this is its path in SOK."""

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import unmet

__all__ = ["get_embedding"]

# Layers by name, for each graph. They are freed with their graph; eager ones are kept.
_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_eager: dict[str, Any] = {}


def get_embedding(name: str, constructor: Callable | None = None, **kwargs: Any) -> Any:
    """The layer called `name`: the first call makes it, later calls return it.

    Each `tf.compat.v1` graph has its own layers; eager code and functions share theirs.

    Args:
        name: The layer's name.
        constructor: `sok.DistributedEmbedding` or `sok.All2AllDenseEmbedding`; required in the
            first call.
        **kwargs: The constructor's arguments; later calls ignore them.

    Raises:
        ValueError: no layer has the name and no constructor is given.
    """
    with tf.init_scope():  # outside of functions
        layers = _eager
        if not tf.executing_eagerly():
            layers = _graphs.setdefault(tf.compat.v1.get_default_graph(), {})
    if name not in layers:
        if constructor is None:
            received = f"name={name!r}; known names: {sorted(layers)}"
            raise unmet("`constructor`", "be given for a new name", received)
        layers[name] = constructor(name=name, **kwargs)
    return layers[name]
