"""Gradients of a table's gradients do not exist; a program that asks for one gets an error.

For a function that is called under two tapes, TensorFlow builds the gradient of the gradient
beforehand, though the program may never ask for it. Then it passes zeros in, and gets zeros back
instead of an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

from sok_like.runtime.framework import hooks

_NO_SECOND_ORDER = (
    "The gradient of a table cannot be differentiated again. A penalty on gradients can be taken "
    "with respect to the rows that a lookup returns: `inner_tape.watch(rows)`, then "
    "`inner_tape.gradient(loss, rows)`. Received: a gradient of `tape.gradient(loss, table)`"
)
_beforehand = hooks.Within()


def refused(grads: Sequence[tf.Tensor | None], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Zeros in the shapes of `inputs`, for a gradient that TensorFlow builds beforehand.

    It raises InvalidArgumentError when it runs and is not zero.
    """
    if not _beforehand:
        raise NotImplementedError(_NO_SECOND_ORDER)
    floats = [g for g in grads if g is not None and g.dtype.is_floating]
    none = tf.reduce_all([tf.reduce_all(tf.equal(gradient, 0.0)) for gradient in floats])
    with tf.control_dependencies([tf.raw_ops.Assert(condition=none, data=[_NO_SECOND_ORDER])]):
        return [tf.zeros_like(value) for value in inputs]


@hooks.at_init
def _install():
    hooks.wrap(
        concrete_function._TapeGradientFunctions,
        "_build_functions_for_outputs",
        _beforehand,
        "TensorFlow builds gradients of gradients beforehand in it, for nobody yet",
    )
