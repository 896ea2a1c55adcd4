"""`sok.tf.keras.mixed_precision.LossScaleOptimizer`: tf_keras' scaling, SOK 1.x's arguments."""

import contextlib
from typing import Any

import tensorflow as tf

from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.stages import as_op, builds_v1_graph
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime.checks import require
from sok_like.runtime.framework.running_keras import is_keras_3

__all__ = ["LossScaleOptimizer"]


def LossScaleOptimizer(optimizer: Any, loss_scale: float | str = "dynamic") -> Any:
    """tf_keras' loss scaling with the arguments of TensorFlow 1, around a stock optimizer.

    Args:
        optimizer: Optimizer of tf_keras, of `tf.compat.v1.keras` or of this package.
        loss_scale: A fixed factor of the loss, or "dynamic": found during training.

    Returns:
        `tf.keras.mixed_precision.LossScaleOptimizer` around it, with `get_scaled_loss`,
        `get_unscaled_gradients`, and `initializer`, that of `optimizer`.

    Raises:
        NotImplementedError: under Keras 3, whose loss scaling lacks these methods.
        ValueError: `loss_scale` is neither "dynamic" nor a number of at least 1.
    """
    if is_keras_3():
        raise NotImplementedError(
            "sok.tf.keras.mixed_precision.LossScaleOptimizer is for tf_keras: start the program "
            "with TF_USE_LEGACY_KERAS=1. For Keras 3 there is "
            "`sok.OptimizerWrapper(tf.keras.optimizers.LossScaleOptimizer(optimizer))`."
        )
    if not knows_tables(optimizer):
        # The program averages, as before. Optimizers without a rule train ordinary variables only.
        with contextlib.suppress(ValueError):
            optimizer = OptimizerWrapper(optimizer, average_dense_gradients=False)
    fits = loss_scale == "dynamic" or (not isinstance(loss_scale, str) and loss_scale >= 1)
    require(fits, "loss_scale", '"dynamic" or a number of at least 1', loss_scale)
    fixed = {} if loss_scale == "dynamic" else {"initial_scale": float(loss_scale)}
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, not fixed, **fixed)
    cls = type(scaling)
    scaling.__class__ = type(cls.__name__, (_InGraphs, cls), {"__module__": __name__})
    return scaling


class _InGraphs:
    """Mixin over tf_keras' loss scaling for `tf.compat.v1` graphs."""

    inner_optimizer: Any

    @property
    def initializer(self):
        return self.inner_optimizer.initializer

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        step = super().apply_gradients
        pairs = list(grads_and_vars)
        if not builds_v1_graph() or not hasattr(self.inner_optimizer, "build"):
            return step(pairs, *args, **kwargs)
        with tf.init_scope():
            self.inner_optimizer.build([variable for _, variable in pairs])
        return as_op(lambda: step(pairs, *args, **kwargs), self.inner_optimizer.name)


def __dir__() -> list[str]:
    return __all__
