"""The `training` flag of a Keras call: a bool, a number, None, or a tensor in tf_keras graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks, running_keras

_evaluating = hooks.Within()


def by_training(training: Any, function: Callable[[bool], Any]) -> Any:
    """`function(training)` with a Python bool.

    None is True, but False in a step of `evaluate` or `predict`: Keras 3 passes no flag to a model
    whose `call` has no argument for it. So it must be the default of a layer's `call`. Keras 3
    hands any other default on to the layers that are called next, such as a Dropout.

    In graphs of tf_keras `training` may be a tensor; then both branches are built.
    """
    if training is None:
        training = not _evaluating
    if tf.is_tensor(training):
        static = tf.get_static_value(training)
        if static is None:
            return tf.cond(
                tf.cast(training, tf.bool), lambda: function(True), lambda: function(False)
            )
        training = static
    return function(bool(training))


@hooks.behind(hooks.MODELS)
def _install():
    why = "lookups of evaluate and predict insert nothing"
    running_keras.note_steps("test", _evaluating, why)
    running_keras.note_steps("predict", _evaluating, why)
