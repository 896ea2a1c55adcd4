"""Adam, LazyAdam, TF 1's LazyAdamOptimizer and row-wise Adagrad.

Each trains embedding and ordinary variables.
"""

from typing import Any

import tensorflow as tf

from sok_like.lookup.local_variables import is_local
from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.optimizers.rules import OptimizerRule, keras_settings
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers


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


@tf.keras.utils.register_keras_serializable("sok_like")
class RowWiseAdagrad(embedding_aware(keras_optimizers().Optimizer)):  # type: ignore[misc]
    """Adagrad with one accumulator per row, for embedding and ordinary variables.

        accumulator += mean(gradient ** 2 over the row)
        row -= learning_rate * gradient / (sqrt(accumulator) + epsilon)

    A table needs one float per row beside the rows; Adagrad needs as many as a row has, and Adam
    twice as many. A row of an ordinary variable is everything behind its first axis, so each
    element of a bias has its own accumulator.

    Args:
        learning_rate: Number or schedule.
        initial_accumulator_value: Accumulator of a new row, at least 0.
        epsilon: Positive number.
        name: Name of the optimizer.
        **kwargs: Keras' own: `weight_decay`, `clipvalue`. For models without tables also the
            others, such as `clipnorm`.

    Raises:
        ValueError: a number is out of range; in `apply_gradients`, a setting that tables cannot
            follow, or a variable of which a rank may hold some columns only.

    Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and
    Data Parallelism", KDD 2021; the formula is FBGEMM's.
    """

    def __init__(
        self,
        learning_rate=0.01,
        initial_accumulator_value=0.0,
        epsilon=1e-8,
        name="rowwise_adagrad",
        **kwargs,
    ):
        # The base class reads the rule. Bypasses Keras' __setattr__, which is not ready yet.
        self.__dict__["initial_accumulator_value"] = initial_accumulator_value
        self.__dict__["epsilon"] = epsilon
        self.__dict__["_sok_accumulators"] = {}
        if is_keras_3():
            super().__init__(learning_rate, name=name, **kwargs)
        else:
            super().__init__(name=name, **kwargs)
            self._learning_rate = self._build_learning_rate(learning_rate)

    def own_rule(self) -> OptimizerRule:
        """The core's rule for tables."""
        numbers: dict[str, Any] = keras_settings(self) | {"epsilon": float(self.epsilon)}
        numbers["initial_accumulator"] = float(self.initial_accumulator_value)
        return OptimizerRule("rowwise_adagrad").replace(**numbers)

    def build(self, variables):
        super().build(variables)
        others = self._sok_ordinary(variables)
        if others and not is_keras_3():
            self._built = True
        for variable in others:
            key = self._var_key(variable)
            if key in self._sok_accumulators:
                continue
            if is_local(variable):
                raise ValueError(
                    "RowWiseAdagrad needs whole rows, and a rank may hold some columns of a table "
                    "of dist_model_parallel only; use Adagrad for it. "
                    f"Received: variable {variable.name!r}"
                )
            shape, value = variable.shape[:1], self.initial_accumulator_value
            if is_keras_3():
                path = getattr(variable, "path", variable.name)  # a tf.Variable has no path
                name = f"{path.replace('/', '_').replace(':', '_')}_accumulator"
                start = tf.keras.initializers.Constant(value)
                accumulator = self.add_variable(shape, start, variable.dtype, name=name)
            else:
                start = tf.fill(shape, tf.cast(value, variable.dtype))
                make = self.add_variable_from_reference
                accumulator = make(variable, "accumulator", shape, start)
            self._sok_accumulators[key] = accumulator

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        """One step of an ordinary variable; Keras calls it."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        accumulator = self._sok_accumulators[self._var_key(variable)]
        # tf.Variables, also those inside variables of Keras 3, accept sparse updates.
        row, total = (getattr(v, "_value", v) for v in (variable, accumulator))
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = tf.cast(gradient.values if sparse else gradient, row.dtype)
        axes = list(range(1, len(values.shape)))
        added = tf.reduce_mean(tf.square(values), axes)
        if sparse:
            total.scatter_add(tf.IndexedSlices(added, gradient.indices))
            total = tf.gather(total, gradient.indices)
        else:
            total = total.assign_add(added)
        scale = tf.cast(rate, row.dtype) / (tf.sqrt(total) + self.epsilon)
        step = values * tf.reshape(scale, [-1] + [1] * len(axes) if axes else tf.shape(values))
        if sparse:
            row.scatter_sub(tf.IndexedSlices(step, gradient.indices))
        else:
            row.assign_sub(step)

    def get_config(self):
        config = super().get_config()
        if not is_keras_3():
            config["learning_rate"] = self._serialize_hyperparameter(self._learning_rate)
        numbers = ("initial_accumulator_value", "epsilon")
        return {**config, **{name: getattr(self, name) for name in numbers}}
