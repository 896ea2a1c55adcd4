"""DeepRec's optimizers for `tf.compat.v1` graphs, under its names.

    AdagradDecayOptimizer     acc = max(rate acc, initial) once per `accumulator_decay_step` steps
    AdagradDecayOptimizerV2   of the program, at a row's next update; then Adagrad
    AdamAsyncOptimizer        Adam that changes only the rows of the batch; or RMSProp with momentum
    AdamWOptimizer            Adam with decoupled weight decay of the rows of the batch

Source of the formulas: DeepRec's `tensorflow/python/training` and
`tensorflow/core/kernels/training_ali_ops.cc`. Tables use the fused rules "adagrad_decay",
"lazy_adam" and "rmsprop" (cpp/core/optimizer.h). Ordinary variables are updated here, by the same
formulas in TensorFlow's ops.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.optimizers.rules import OptimizerRule, number_of
from sok_like.runtime.checks import require

v1 = tf.compat.v1


class _Rows(NamedTuple):
    """Reads and writes the rows of a variable that a gradient has, or all rows."""

    indices: Any = None

    def read(self, variable):
        value = tf.convert_to_tensor(variable)
        return value if self.indices is None else tf.gather(value, self.indices)

    def write(self, variable, rows):
        if self.indices is None:
            return variable.assign(rows)
        return v1.scatter_update(variable, self.indices, rows)


def _for_tables(cls):
    """Decorator: the class for tables and ordinary variables, under the same name."""
    aware: Any = embedding_aware(cls)
    aware.__name__ = aware.__qualname__ = cls.__name__
    aware.__module__, aware.__doc__ = __name__, cls.__doc__
    return aware


class _RowOptimizer(v1.train.Optimizer):  # type: ignore[name-defined]
    """A stock optimizer; a subclass says how `_update` changes some rows, each there once."""

    _update: Any  # takes a gradient, a variable and `_Rows`

    def _apply_dense(self, grad, var):
        return self._update(grad, var, _Rows())

    _resource_apply_dense = _apply_dense

    def _apply_sparse(self, grad, var):
        return self._update(grad.values, var, _Rows(grad.indices))

    def _resource_apply_sparse(self, grad, var, indices):
        return self._update(grad, var, _Rows(indices))

    def _filled_slot(self, var, name, value, shape):
        dtype = var.dtype.base_dtype
        initial = v1.constant_initializer(value, dtype)
        args = (initial, tf.TensorShape(shape), dtype, name, self._name)
        self._get_or_make_slot_with_initializer(var, *args)


@_for_tables
class AdagradDecayOptimizer(_RowOptimizer):
    """Adagrad with accumulators that decay at multiples of a number of global steps.

    When a row is updated for the first time after `global_step + 1` reached another multiple of
    `accumulator_decay_step`, its accumulator becomes
    `max(accumulator * accumulator_decay_rate, initial_accumulator_value)`. A row that missed
    several multiples decays once at each of its next updates. In tables, each element of a row has
    two more floats: its accumulator and the number of its decays.

    Args:
        learning_rate: Scalar.
        global_step: The program's step, a variable.
        initial_accumulator_value: Positive; the initial value and the minimum of accumulators.
        accumulator_decay_step: Positive integer.
        accumulator_decay_rate: In (0, 1).

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        learning_rate: Any,
        global_step: Any,
        initial_accumulator_value: float = 0.1,
        accumulator_decay_step: int = 100000,
        accumulator_decay_rate: float = 0.9,
        use_locking: bool = False,
        name: str = "AdagradDecay",
    ):
        initial, rate = initial_accumulator_value, accumulator_decay_rate
        decay_step, steps = accumulator_decay_step, int(accumulator_decay_step)
        is_whole = steps > 0 and steps == decay_step  # as 1e5 is, and 1.5 is not
        require(initial > 0, "initial_accumulator_value", "positive", initial)
        require(is_whole, "accumulator_decay_step", "a positive whole number", decay_step)
        require(0 < rate < 1, "accumulator_decay_rate", "in (0, 1)", rate)
        super().__init__(use_locking, name)
        self._learning_rate, self._global_step = learning_rate, global_step
        self._initial, self._decay_steps, self._decay_rate = float(initial), steps, float(rate)

    def own_rule(self):
        return OptimizerRule("adagrad_decay").replace(
            initial_accumulator=self._initial,
            decay_steps=self._decay_steps,
            decay_rate=self._decay_rate,
        )

    def own_step(self):
        # Decay depends on the program's step, which may differ from the number of updates here.
        return tf.cast(tf.convert_to_tensor(self._global_step), tf.int64) + 1

    def _create_slots(self, var_list):
        for var in var_list:
            self._filled_slot(var, "accumulator", self._initial, var.shape)
            self._zeros_slot(var, "accumulator_decay_power", self._name)

    def _update(self, gradient, variable, rows):
        accumulators = self.get_slot(variable, "accumulator")
        powers = self.get_slot(variable, "accumulator_decay_power")
        accumulator, power = rows.read(accumulators), rows.read(powers)
        late = tf.cast(self.own_step() // self._decay_steps, power.dtype) > power
        decayed = tf.maximum(accumulator * self._decay_rate, self._initial)
        accumulator = tf.where(late, decayed, accumulator) + gradient * gradient
        rate = tf.cast(self._call_if_callable(self._learning_rate), power.dtype)
        row = rows.read(variable) - rate * gradient / tf.sqrt(accumulator)
        return tf.group(
            rows.write(accumulators, accumulator),
            rows.write(powers, power + tf.cast(late, power.dtype)),
            rows.write(variable, row),
        )


@_for_tables
class AdagradDecayOptimizerV2(AdagradDecayOptimizer):
    __doc__ = AdagradDecayOptimizer.__doc__


class _AdamRows(_RowOptimizer):
    """Adam's moments of rows, and the powers of beta that each variable has for itself."""

    _is_rmsprop = False  # RMSProp with momentum, of sparse gradients
    _weight_decay: Any = 0.0

    def __init__(self, learning_rate, beta1, beta2, epsilon, use_locking, name):
        super().__init__(use_locking, name)
        self._lr = learning_rate
        self._beta1, self._beta2, self._epsilon = beta1, beta2, epsilon

    def _create_slots(self, var_list):
        for var in var_list:
            for slot in ("m", "v"):
                self._zeros_slot(var, slot, self._name)
            for slot, beta in (("beta1_power", self._beta1), ("beta2_power", self._beta2)):
                self._filled_slot(var, slot, self._call_if_callable(beta), [])

    def _update(self, gradient, variable, rows):
        values = (self._lr, self._beta1, self._beta2, self._epsilon, self._weight_decay)
        rate, beta_1, beta_2, epsilon, decay = (
            tf.cast(self._call_if_callable(value), gradient.dtype) for value in values
        )
        moments, velocities = self.get_slot(variable, "m"), self.get_slot(variable, "v")
        row, m, updates = rows.read(variable), beta_1 * rows.read(moments), []
        v = beta_2 * rows.read(velocities) + (1 - beta_2) * gradient * gradient
        if self._is_rmsprop and rows.indices is not None:
            m += rate * gradient * tf.math.rsqrt(v + epsilon)
            row -= m
        else:
            powers = [self.get_slot(variable, f"beta{i}_power") for i in (1, 2)]
            power_1, power_2 = [tf.convert_to_tensor(power) for power in powers]
            alpha = rate * tf.sqrt(1 - power_2) / (1 - power_1)
            m += (1 - beta_1) * gradient
            row = row - decay * row - alpha * m / (tf.sqrt(v) + epsilon)
            with tf.control_dependencies([alpha]):
                updates = [powers[0].assign(power_1 * beta_1), powers[1].assign(power_2 * beta_2)]
        return tf.group(
            rows.write(moments, m), rows.write(velocities, v), rows.write(variable, row), *updates
        )

    def own_rule(self):
        names = {"beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"}
        numbers = {option: number_of(self, attribute) for option, attribute in names.items()}
        return OptimizerRule("rmsprop" if self._is_rmsprop else "lazy_adam").replace(**numbers)


@_for_tables
class AdamAsyncOptimizer(_AdamRows):
    """Adam that updates only the rows of the batch; each variable has its own powers of beta.

    With `apply_sparse_rmsprop=True`, tables and sparse gradients use RMSProp with momentum:
    `v = beta2 v + (1 - beta2) g^2`, `m = beta1 m + lr g / sqrt(v + epsilon)`, `w -= m`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        apply_sparse_rmsprop: bool = False,
        name: str = "AdamAsync",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._is_rmsprop = apply_sparse_rmsprop


@_for_tables
class AdamWOptimizer(_AdamRows):
    """Adam with decoupled weight decay of all that has a gradient, as in DeepRec.

    Rows of a table: `w -= alpha (m / (sqrt(v) + epsilon) + weight_decay w)` with Adam's
    `alpha = lr sqrt(1 - beta2^t) / (1 - beta1^t)`, only for the rows of the batch. An ordinary
    variable decays by `weight_decay w`, which the learning rate does not multiply. Both are
    DeepRec's formulas.
    """

    def __init__(
        self,
        weight_decay: float,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "AdamW",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._weight_decay = weight_decay

    def own_rule(self):
        return super().own_rule().replace(row_weight_decay=number_of(self, "_weight_decay"))
