"""`sok.optimizers.RowWiseAdagrad`: one number of state per row."""

from typing import Any

import tensorflow as tf

from sok_like.lookup.local_variables import is_local
from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.optimizers.rules import OptimizerRule, check_keras_settings
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers


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
        check_keras_settings(self)
        numbers = {
            "initial_accumulator": float(self.initial_accumulator_value),
            "epsilon": float(self.epsilon),
            "weight_decay": self.weight_decay or 0.0,
            "clip_value": self.clipvalue or 0.0,
        }
        return OptimizerRule("rowwise_adagrad", tuple(numbers.items()))

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
            self._sok_accumulators[key] = self._accumulator(variable)

    def _accumulator(self, variable):
        shape, value = variable.shape[:1], self.initial_accumulator_value
        if is_keras_3():
            path = getattr(variable, "path", variable.name)  # a tf.Variable has no path
            name = f"{path.replace('/', '_').replace(':', '_')}_accumulator"
            start = tf.keras.initializers.Constant(value)
            return self.add_variable(shape, start, variable.dtype, name=name)
        return self.add_variable_from_reference(
            variable, "accumulator", shape, tf.fill(shape, tf.cast(value, variable.dtype))
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        """One step of an ordinary variable; Keras calls it."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        accumulator = self._sok_accumulators[self._var_key(variable)]
        # tf.Variables, also those inside variables of Keras 3, accept sparse updates.
        row, total = (getattr(v, "_value", v) for v in (variable, accumulator))
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = gradient.values if sparse else gradient
        values = tf.cast(values, row.dtype)
        behind = list(range(1, len(values.shape)))
        added = tf.reduce_mean(tf.square(values), behind) if behind else tf.square(values)
        if sparse:
            total.scatter_add(tf.IndexedSlices(added, gradient.indices))
            total = tf.gather(total, gradient.indices)
        else:
            total = total.assign_add(added)
        scale = tf.cast(rate, row.dtype) / (tf.sqrt(total) + self.epsilon)
        step = values * tf.reshape(scale, [-1] + [1] * len(behind) if behind else tf.shape(values))
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
