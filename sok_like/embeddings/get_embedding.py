"""`sok.get_embedding`: layers by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Graph: its layers by name. A graph's layers die with it; those made eagerly live on.
_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_eager: dict[str, Any] = {}


def get_embedding(name: str, constructor: Callable | None = None, **kwargs: Any) -> Any:
    """The layer called `name`, made at the first call and returned by later ones.

    Each `tf.compat.v1` graph has layers of its own; eager code and functions share theirs.

    Args:
        name: The layer's name.
        constructor: `sok.DistributedEmbedding` or `sok.All2AllDenseEmbedding`; needed at the first
            call.
        **kwargs: Its arguments; ignored by later calls.

    Raises:
        ValueError: no layer has the name and no constructor is given.
    """
    layers = _layers()
    if name not in layers:
        if constructor is None:
            raise ValueError(
                f"`constructor` must be given for a new name. Received: name={name!r}; known "
                f"names: {sorted(layers)}"
            )
        layers[name] = constructor(name=name, **kwargs)
    return layers[name]


def _layers():
    with tf.init_scope():  # out of functions
        if tf.executing_eagerly():
            return _eager
        return _graphs.setdefault(tf.compat.v1.get_default_graph(), {})
