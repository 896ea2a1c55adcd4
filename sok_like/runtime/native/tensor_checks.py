"""Conditions on tensors, checked when an op runs: eagerly at once, in a graph with each step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def checked(tensor: Any, condition: Any, text: str, *received: Any) -> Any:
    """`tensor`, of which nothing is read unless `condition`, a bool scalar, is true.

    If it is not, InvalidArgumentError has `text` and the tensors of `received`. In a graph each of
    `tf.debugging`'s checks is a `tf.cond`, which takes many times as long to trace as one op.
    """
    check = tf.raw_ops.Assert(condition=condition, data=[text, *received])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(tensor)
