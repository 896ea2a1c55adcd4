"""A Keras optimizer's step as one op of a `tf.compat.v1` graph.

Keras' optimizers update their variables one by one. Eager execution and `tf.function` run every
update; a session runs only what the fetched op depends on, and would drop them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def builds_v1_graph() -> bool:
    """Whether ops made now belong to a graph that a session will run."""
    return not tf.executing_eagerly() and not tf.inside_function()


def as_op(step: Callable[[], Any], name: str) -> tf.Operation:
    """The op that does all of `step()`, in order. Variables must exist already."""

    def whole():
        step()
        return tf.constant(True)

    # A function always runs as a whole, whichever of its results is fetched.
    return tf.group(tf.function(whole, autograph=False)(), name=name)
