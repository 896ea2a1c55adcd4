"""Which variables belong to one rank, and are not averaged over ranks; names for collectives."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import horovod
from sok_like.table.variable import is_embedding_variable

# How often each name was used, by graph.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def faces(variable: Any):
    """All objects by which a variable is seen: itself, the one it wraps, and their handles."""
    seen = [variable]
    for name in ("_value", "_variable"):  # of Keras 3, and of tf_keras' mixed precision
        inner = getattr(variable, name, None)
        if isinstance(inner, tf.Variable):
            seen.append(inner)
    # Reference variables (`tf.disable_v2_behavior()`) have no handle.
    handles = [getattr(face, "handle", None) for face in seen if isinstance(face, tf.Variable)]
    return seen + [handle for handle in handles if handle is not None]


def is_local(variable: Any) -> bool:
    """Whether a variable is this rank's own: neither averaged over ranks nor broadcast.

    True for marked variables and every EmbeddingVariable, whichever layer it belongs to.

    Args:
        variable: Any object; for what is not a variable the result is False.
    """
    return is_embedding_variable(variable) or any(
        getattr(face, "de_local", False) for face in faces(variable)
    )


def has_norm(variable: Any) -> bool:
    """Whether the norm of a local variable is that of what all ranks have of one table."""
    return all(getattr(face, "_sok_has_norm", True) for face in faces(variable))


def unique_in_graph(name: str) -> str:
    """`name`, with a number from its second use in the graph being built.

    Collectives of one graph may run at the same time and are matched by name. The number must be
    the same on all ranks, so it is counted per graph: a rank may trace a function again, for an
    odd batch, while others do not. Eager collectives end before the next one begins.
    """
    if tf.executing_eagerly():
        return name
    names = _used.setdefault(tf.compat.v1.get_default_graph(), {})
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}_{names[name]}"


@hooks.at_init
def _install():
    horovod.leave_alone(is_local)
