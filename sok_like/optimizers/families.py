"""The four families of stock optimizers, with one adapter each: a mixin over a stock class.

    apply_gradients(...)          (gradient, variable) pairs
      | the stages of its class     learning rate, step, loss scale, whether to average
    stock apply_gradients         the pairs that are left

The stages are in `_sok_stages`. The first one brings gradients to those of the whole batch;
tf_keras' loss scaling asks for it alone, by `aggregate_gradients`.

    sok.OptimizerWrapper       average, report_missing (not v1), train_tables, sum_rows (Keras 3)
    dmp.DistributedOptimizer   average_all, and those of the wrapped class behind its first
    distribution.optimizer     take_parts, report_missing, train_tables, note_updated

Loss scaling: either all ranks take a step or none does (`all_finite`). `LossScaling` is the mixin
over Keras 3's `LossScaleOptimizer`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from sok_like.optimizers import stages
from sok_like.optimizers.stages import Pairs, Step, as_op, builds_v1_graph, unscaled
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.variable import is_embedding_variable, unwrap

_DECISION = object()  # stands in the place of a variable


def all_finite(gradients: Iterable[Any], communicator: comm.Communicator) -> tf.Tensor:
    """Whether all gradients of all ranks are finite: bool scalar, the same on every rank."""
    # Keras checks those of its own process. A rank whose gradients overflow would skip a step that
    # the others take: their collectives would wait for it, and the loss scales would differ.
    # Parts of several lookups may be finite, and their sum not.
    values = [comm.summed_values(gradient) for gradient in gradients if gradient is not None]
    are_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    finite = tf.reduce_all(tf.stack(are_finite)) if are_finite else tf.constant(True)
    if communicator.world_size == 1:
        return finite
    own = [tf.cast(finite, tf.float32)]
    (share,) = exchange_order.collective_in_turn(communicator, "average", own, "sok_finite")
    return tf.equal(share, 1.0)


def _without_decision(pairs):
    return [(gradient, variable) for gradient, variable in pairs if variable is not _DECISION]


class Adapter:
    """What the adapters share. A subclass defines `_sok_learning_rate` and `_sok_step_number`."""

    _sok_stages: tuple[Callable, ...] = (stages.average, stages.report_missing, stages.train_tables)
    # Whether all ranks take every step, whatever its variables are.
    _sok_steps_together = False

    def _sok_ordinary(self, variables):
        """The variables that the stock class must know; those of a step, before it."""
        return list(variables)

    @contextlib.contextmanager
    def _sok_staged(self, pairs: Pairs, **options: Any) -> Iterator[tuple[Pairs, Step]]:
        """Takes the stages; a scope for the stock class's step with the pairs that are left."""
        step = Step(self, **options)
        with step.scopes:
            for stage in self._sok_stages:
                pairs = stage(self, pairs, step)
            yield pairs, step

    def _sok_aggregate(self, grads_and_vars, own):
        """What tf_keras' LossScaleOptimizer asks for before it decides whether to take the step.

        On several ranks the last pair is the decision: NaN unless all ranks' gradients are finite.
        """
        # Gradients are summed by key: parts may be finite, and their sum not. `own`, the stock
        # method, sums over the replicas of a strategy.
        (average, *_), step = self._sok_stages, Step(self)
        with step.scopes:
            pairs = average(self, [(g, v) for g, v in grads_and_vars if g is not None], step)
            tables = [(comm.distinct(g), v) for g, v in pairs if is_embedding_variable(v)]
            others = [pair for pair in pairs if not is_embedding_variable(pair[1])]
            pairs = [*tables, *(own(others) if others else others)]
            communicator = comm.current_or_single()
            if communicator.world_size > 1 and len(_without_decision(pairs)) == len(pairs):
                finite = all_finite([gradient for gradient, _ in pairs], communicator)
                pairs.append((tf.where(finite, 0.0, float("nan")), _DECISION))
            return pairs


class Keras3(Adapter):
    """Over `keras.optimizers.Optimizer` of Keras 3."""

    _sok_stages = (*Adapter._sok_stages, stages.sum_rows)

    def __setattr__(self, name, value):
        # Keras' LossScaleOptimizer switches off the scaling of the optimizer that it wraps. An
        # error is raised here, in `compile`, not in the first step.
        if name == "loss_scale_factor" and name in self.__dict__:
            self._sok_check_scaling(value)
        super().__setattr__(name, value)

    def _sok_check_scaling(self, factor):
        """Raises if this optimizer cannot be inside of a LossScaleOptimizer."""

    def apply_gradients(self, grads_and_vars, name=None, *, experimental_aggregate_gradients=True):
        # The last two are arguments of tf_keras.
        grads, variables = zip(*grads_and_vars, strict=True)
        # A subclass that overrides `apply` takes Keras' arguments only.
        options = {} if experimental_aggregate_gradients else {"average": False}
        op = self.apply(grads, variables, **options)
        return op if builds_v1_graph() else self._iterations

    def apply(self, grads, trainable_variables=None, *, average=True):
        grads, variables = list(grads), trainable_variables
        if variables is None:  # those of `build`, including tables
            variables = getattr(self, "_sok_trainable", self._trainable_variables)
            if len(variables) != len(grads):
                return super().apply(grads)  # raises Keras' own error
        pairs = list(zip(grads, variables, strict=True))
        if not pairs:
            return None
        variables = [variable for _, variable in pairs]
        if not self.built:
            self.build(variables)
        if builds_v1_graph():
            options = {} if average else {"average": False}
            return as_op(lambda: self.apply(grads, variables, **options), self.name)
        self._check_variables_are_known(self._sok_ordinary(variables))
        scale = self.loss_scale_factor
        with self._sok_staged(pairs, average=average, scale=scale) as (pairs, _):
            if pairs:
                super().apply(*zip(*pairs, strict=True))
            else:
                self._iterations.assign_add(1)

    def _sok_learning_rate(self):
        return self.learning_rate

    def _sok_step_number(self):
        return self._iterations + 1


class TfKeras(Adapter):
    """Over `tf_keras.optimizers.Optimizer`."""

    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        average = kwargs.pop("experimental_aggregate_gradients", True)
        average = average and not skip_gradients_aggregation
        pairs = _without_decision(grads_and_vars)
        if not pairs:
            return super().apply_gradients(pairs, name, True, **kwargs)
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
            if not hasattr(self, "_current_learning_rate"):
                self._compute_current_learning_rate()
        if builds_v1_graph():
            # Without `name`, which Keras would use for new variables; they exist already.
            again = functools.partial(
                self.apply_gradients, pairs, experimental_aggregate_gradients=average, **kwargs
            )
            return as_op(again, name or self.name)
        with self._sok_staged(pairs, average=average) as (pairs, _):
            if not pairs:
                self._compute_current_learning_rate()  # sets `learning_rate` of a schedule
                return self.iterations.assign_add(1)
            if average:  # over the replicas of a strategy
                pairs = super().aggregate_gradients(pairs)
            return super().apply_gradients(pairs, name, True, **kwargs)

    def aggregate_gradients(self, grads_and_vars):
        return self._sok_aggregate(grads_and_vars, super().aggregate_gradients)

    def minimize(self, loss, var_list, tape=None):
        if not builds_v1_graph() or tape is not None:
            return super().minimize(loss, var_list, tape)
        loss = loss() if callable(loss) else loss
        variables = list(var_list() if callable(var_list) else var_list)
        gradients = tf.gradients(loss, [unwrap(variable) for variable in variables])
        return self.apply_gradients(zip(gradients, variables, strict=True))

    def _sok_learning_rate(self):
        rate = self._learning_rate
        if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return rate

    def _sok_step_number(self):
        return self.iterations + 1


class LegacyKeras(Adapter):
    """Over `tf_keras.optimizers.legacy.Optimizer`, also those of `tf.compat.v1.keras`."""

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        pairs, average = _without_decision(grads_and_vars), experimental_aggregate_gradients
        ordinary = self._sok_ordinary([variable for _, variable in pairs])
        if not any(gradient is not None for gradient, _ in pairs):
            return super().apply_gradients(pairs, name)  # raises Keras' own error
        getattr(self, "embedding_rule", None)  # before Keras turns its numbers into variables
        with tf.init_scope():
            self._create_all_weights(ordinary)
        with self._sok_staged(pairs, average=average) as (pairs, step):
            if average and pairs:  # over the replicas of a strategy
                pairs = list(super()._aggregate_gradients(pairs))
            with tf.control_dependencies([*step.updates, step.number]):
                if not pairs:
                    return tf.group(self.iterations.assign_add(1), name=name)
                return super().apply_gradients(pairs, name, experimental_aggregate_gradients=False)

    def _aggregate_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        with tf.init_scope():
            self._create_all_weights(self._sok_ordinary(variable for _, variable in pairs))
        return self._sok_aggregate(pairs, super()._aggregate_gradients)

    def _sok_learning_rate(self):
        return self._decayed_lr(tf.float32)

    def _sok_step_number(self):
        return self.iterations.read_value() + 1


class V1(Adapter):
    """Over `tf.compat.v1.train.Optimizer`."""

    _sok_stages = (stages.average, stages.train_tables)  # stock ones report nothing either

    def compute_gradients(self, loss, var_list=None, *args, **kwargs):
        # Keras 3 wraps a layer's variables, and v1 accepts only its own kinds.
        if var_list is not None:
            var_list = [unwrap(variable) for variable in tf.nest.flatten(var_list)]
        return super().compute_gradients(loss, var_list, *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        self._sok_ordinary([variable for _, variable in pairs])
        if not any(gradient is not None for gradient, _ in pairs):
            return super().apply_gradients(pairs, global_step, name)  # raises TF's own error
        with self._sok_staged(pairs) as (pairs, step):
            updates = [*step.updates, step.number]
            if pairs:
                updates.append(super().apply_gradients(pairs))
        with tf.control_dependencies(updates):
            updates = [self._sok_counter("steps").assign_add(1)]
            if global_step is not None:
                updates.append(global_step.assign_add(tf.ones([], global_step.dtype)))
            return tf.group(*updates, name=name or self.get_name())

    def _sok_learning_rate(self):
        rate = getattr(self, "_lr", None)
        return self._call_if_callable(self._learning_rate if rate is None else rate)

    def _sok_step_number(self):
        own = getattr(self, "own_step", None)  # for an optimizer that counts differently
        return self._sok_counter("steps").read_value() + 1 if own is None else own()


class LossScaling:
    """Mixin over Keras 3's `LossScaleOptimizer`, whose inner optimizer is embedding-aware.

    Keras' own cannot handle a gradient whose indices are keys.
    """

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        inner = config.pop("inner_optimizer")
        inner = tf.keras.utils.deserialize_keras_object(inner, custom_objects)
        inner.__dict__["_sok_scaling_allowed"] = True  # only for this class
        scaling = cls(inner, **config)
        inner.__dict__["_sok_scaling_allowed"] = False
        return scaling

    def build(self, var_list):
        with contextlib.ExitStack() as stack:
            for variable in filter(is_embedding_variable, var_list):
                stack.enter_context(unwrap(variable).asked_by_known_optimizer())
            super().build(var_list)

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def check_finite(self, grads: Any) -> tf.Tensor:
        """Whether all gradients of all ranks are finite, bool scalar, the same on every rank."""
        return all_finite(grads, comm.current_or_single())

    def _stateful_handle_finite_grads(self, grads, trainable_variables):
        # Keras divides by the scale, too, but gradients by key would not stay sparse there.
        scale = tf.convert_to_tensor(self.dynamic_scale)
        variables = trainable_variables or self._trainable_variables
        grads = [
            unscaled(g, scale) if is_embedding_variable(v) else g
            for g, v in zip(grads, variables, strict=True)
        ]
        super()._stateful_handle_finite_grads(grads, trainable_variables)

    def _overwrite_variable_with_gradient(self, variable):
        # Keras asks whether to leave a gradient unscaled: yes, as it already is.
        return is_embedding_variable(variable) or super()._overwrite_variable_with_gradient(
            variable
        )


ADAPTERS: dict[str, type[Adapter]] = {
    "keras": Keras3,
    "tf_keras": TfKeras,
    "legacy": LegacyKeras,
    "tf.compat.v1": V1,
}
