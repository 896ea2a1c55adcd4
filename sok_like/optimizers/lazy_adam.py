"""Adam for embedding and ordinary variables, and LazyAdam, which changes only rows of the batch."""

import tensorflow as tf

from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.runtime.framework.running_keras import keras_optimizers


@tf.keras.utils.register_keras_serializable("sok_like")
class Adam(embedding_aware(keras_optimizers().Adam)):  # type: ignore[misc]
    """`tf.keras.optimizers.Adam` that also trains embedding variables.

    The result is that of Adam on a dense variable: the moments of every row decay at every step,
    whether the row is in the batch or not. The cost is only that of the rows in the batch: a row
    catches up when it is next read or updated. Gradients of equal keys are summed. Arguments are
    those of `tf.keras.optimizers.Adam` (learning_rate 0.001, beta_1 0.9, beta_2 0.999, epsilon
    1e-7).

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """


@tf.keras.utils.register_keras_serializable("sok_like")
class LazyAdam(Adam):
    """`sok.tf.keras.optimizers.Adam` with the update of `LazyAdamOptimizer`, for Keras' `compile`.

    Ordinary variables follow Keras' Adam. Rows of embedding variables change only when they are in
    the batch.
    """

    _sok_lazy = True


class LazyAdamOptimizer(embedding_aware(tf.compat.v1.train.AdamOptimizer)):  # type: ignore[misc]
    """Adam that changes only the rows of a gradient; the optimizer of TF 1's `tf.contrib.opt`.

    Absent rows keep their moments and weights. Adam would decay the moments and still move the
    rows. Dense gradients follow Adam. The bias correction counts every step.

    Args:
        learning_rate: Number, tensor or callable.
        beta1, beta2, epsilon: As in `tf.compat.v1.train.AdamOptimizer` (0.9, 0.999, 1e-8).
        use_locking: Locks ordinary variables during their update.
        name: Name of the optimizer.

    Raises:
        ValueError: in `apply_gradients`, no variable has a gradient.
    """

    _sok_lazy = True

    def __init__(
        self,
        learning_rate=0.001,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        use_locking=False,
        name="LazyAdam",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)

    def _apply_sparse(self, grad, var):
        return self._lazy_update(grad.values, var, grad.indices)

    def _resource_apply_sparse(self, grad, var, indices):
        return self._lazy_update(grad, var, indices)

    def _lazy_update(self, grad, var, indices):
        """Adam's formula for rows `indices` of an ordinary variable; indices do not repeat."""
        settings = self._lr_t, self._beta1_t, self._beta2_t, self._epsilon_t
        beta1_power, beta2_power, rate, beta1, beta2, epsilon = (
            tf.cast(number, var.dtype.base_dtype)
            for number in (*self._get_beta_accumulators(), *settings)
        )
        alpha = rate * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        momentum, velocity = self.get_slot(var, "m"), self.get_slot(var, "v")
        m = beta1 * tf.gather(momentum, indices) + (1 - beta1) * grad
        v = beta2 * tf.gather(velocity, indices) + (1 - beta2) * tf.square(grad)
        with tf.control_dependencies([m, v]):
            updates = [
                momentum.scatter_update(tf.IndexedSlices(m, indices)),
                velocity.scatter_update(tf.IndexedSlices(v, indices)),
                var.scatter_sub(tf.IndexedSlices(alpha * m / (tf.sqrt(v) + epsilon), indices)),
            ]
        return tf.group(*updates)
