"""Whether the weights of a lookup may have a gradient.

The gradient of weights needs the row that each key had in the lookup. An op that looks up keeps
these rows only for weights that may be learned.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record


def are_possible(weights: tf.Tensor | None) -> bool:
    """Whether someone may take the gradient of `weights`, of a lookup that is being made.

    In a graph, weights that the function or session is given may be learned outside of it. A
    program that knows better says so by `tf.stop_gradient`.
    """
    if weights is None:
        return False
    if tf.executing_eagerly():
        return record.should_record_backprop([weights])
    seen: set[Any] = set()
    left = [weights.op]
    while left:
        op = left.pop()
        if op in seen or op.type == "StopGradient":
            continue
        seen.add(op)
        if op.type.startswith(_SOURCES):
            return True
        left += [value.op for value in op.inputs if value.dtype in _CARRIERS]
    return False


# What a graph is given: arguments and captures of a function, placeholders, and variables.
_SOURCES = ("Placeholder", "VarHandleOp", "Variable")
_CARRIERS = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.resource, tf.variant)
