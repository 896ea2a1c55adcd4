"""Variables that differ from rank to rank: which those are, and names for their collectives."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from sok_like.table.variable import is_embedding_variable

# Graph: how often each name was used in it.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _faces(variable: Any):
    """A variable as everyone meets it: itself, what a wrapper holds, and the handle of both."""
    seen = [variable]
    for name in ("_value", "_variable"):  # of Keras 3; of tf_keras' mixed precision
        inner = getattr(variable, name, None)
        if isinstance(inner, tf.Variable):
            seen.append(inner)
    # A reference variable of `tf.disable_v2_behavior()` has no handle.
    handles = [getattr(face, "handle", None) for face in seen if isinstance(face, tf.Variable)]
    return seen + [handle for handle in handles if handle is not None]


def mark_local(variable: Any) -> Any:
    """Marks a variable as this rank's own, by `de_local = True`; returns it."""
    for face in _faces(variable):
        try:
            face.de_local = True
        except AttributeError:  # a symbolic handle takes no attributes
            pass
    return variable


def is_local(variable: Any) -> bool:
    """Whether a variable is this rank's own: not to be averaged over ranks nor broadcast.

    One that was marked, or an EmbeddingVariable, whichever layer it belongs to.
    """
    return is_embedding_variable(variable) or any(
        getattr(face, "de_local", False) for face in _faces(variable)
    )


def unique_in_graph(name: str) -> str:
    """`name`, numbered from its second use in the graph being built.

    Collectives of one graph may be under way together and are told apart by name. The number must
    be the same on all ranks, so it counts within the graph: a rank may trace a function anew, for
    an odd batch, while the others do not. Eager collectives end before the next begins.
    """
    if tf.executing_eagerly():
        return name
    names = _used.setdefault(tf.compat.v1.get_default_graph(), {})
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}_{names[name]}"
