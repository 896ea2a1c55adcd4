"""The `training` argument of a Keras call: a bool, an integer, or a tensor in tf_keras graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def by_training(training: Any, function: Callable[[bool], Any]) -> Any:
    """`function(training)` with a Python bool.

    In graphs of tf_keras `training` may be a tensor; then both branches are built.
    """
    if tf.is_tensor(training):
        static = tf.get_static_value(training)
        if static is None:
            return tf.cond(
                tf.cast(training, tf.bool), lambda: function(True), lambda: function(False)
            )
        training = static
    return function(bool(training))
