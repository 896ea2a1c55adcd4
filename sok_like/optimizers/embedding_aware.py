"""Stock optimizers that also train embedding variables.

`embedding_aware(cls)` is a subclass of a stock optimizer class, by one of four mixins: for Keras 3,
tf_keras, its legacy optimizers and tf.compat.v1.train.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from sok_like.optimizers import graph_step
from sok_like.optimizers.aware import EmbeddingAware
from sok_like.optimizers.legacy_keras import LegacyKeras
from sok_like.runtime.framework.keras_version import keras_optimizers, optimizer_family
from sok_like.runtime.ranks import comm, finite_gradients
from sok_like.table.variable import is_embedding_variable, unwrap

_STOCK = ("keras", "tf_keras", "tensorflow")  # packages of stock optimizers


class _Decaying(EmbeddingAware):
    """What Keras 3 and tf_keras share: optimizers that decay weights, except some."""

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        if self._sok_tables:  # whose own optimizers would decay them all the same
            raise ValueError(
                f"Tables {sorted(self._sok_tables)} have optimizers of their own. Call "
                "`exclude_from_weight_decay` on each of them and on `default`, with tables in "
                "`var_names`, before `sok.OptimizerWrapper` joins them. Received: a call on the "
                "joint optimizer"
            )
        var_list = list(var_list or [])
        with contextlib.ExitStack() as scopes:
            for variable in var_list:
                if is_embedding_variable(variable):
                    scopes.enter_context(unwrap(variable).asked_by_known_optimizer())
            super().exclude_from_weight_decay(var_list, var_names)


class _Keras3(_Decaying):
    def __setattr__(self, name, value):
        # Keras' LossScaleOptimizer switches off the scaling of the optimizer that it wraps. The
        # stock class cannot handle gradients by key; raise here, in `compile`, not in step one.
        if name == "loss_scale_factor" and not getattr(self, "_sok_scaling_allowed", True):
            raise ValueError(
                "Keras' LossScaleOptimizer, which `compile` puts around an optimizer under "
                "`mixed_float16`, cannot handle embedding variables. Give compile "
                "`sok.OptimizerWrapper(tf.keras.optimizers.LossScaleOptimizer(optimizer))` (with "
                "optimizers of tables `default=` is the one to scale), or choose "
                "`mixed_bfloat16`, which needs no loss scaling."
            )
        super().__setattr__(name, value)
        if name == "loss_scale_factor":
            self.__dict__["_sok_scaling_allowed"] = False

    def build(self, variables):
        # Bypasses Keras' __setattr__, which would make them part of the optimizer's saved state.
        self.__dict__["_sok_trainable"] = list(variables)
        others = self._sok_take(variables)
        if others:  # Keras builds once; ordinary variables may come in a later call
            super().build(others)

    def apply_gradients(self, grads_and_vars, name=None, *, experimental_aggregate_gradients=True):
        # The last two are arguments of tf_keras.
        pairs, average = list(grads_and_vars), self._sok_average
        self.__dict__["_sok_average"] = average and experimental_aggregate_gradients
        try:
            if graph_step.builds_v1_graph():
                return self.apply(*zip(*pairs, strict=True))
            return super().apply_gradients(pairs)
        finally:
            self.__dict__["_sok_average"] = average

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        if trainable_variables is None:
            trainable_variables = getattr(self, "_sok_trainable", None)
            if trainable_variables is None or len(trainable_variables) != len(grads):
                return super().apply(grads)  # raises Keras' own error
        trainable_variables = list(trainable_variables)
        if not self.built:
            self.build(trainable_variables)
        for variable in self._sok_take(trainable_variables):
            self._check_variables_are_known([variable])
        if graph_step.builds_v1_graph():
            return graph_step.as_op(lambda: self.apply(grads, trainable_variables), self.name)
        pairs = list(zip(grads, trainable_variables, strict=True))
        self._sok_tell_missing(pairs)
        scale = self.loss_scale_factor
        if scale is not None:
            pairs = [(unscaled(g, scale) if is_embedding_variable(v) else g, v) for g, v in pairs]
        _, other = self._sok_step(pairs, self.learning_rate, self._iterations + 1)
        # Unlike the others, Keras 3 would square the parts of a row's gradient one by one.
        if self._sok_sums_rows:
            other = [(comm.distinct(g), v) for g, v in other]
        if other:
            super().apply(*zip(*other, strict=True))
        else:
            self._iterations.assign_add(1)

    def _sok_learning_rate(self):
        return self.learning_rate


def unscaled(gradient: tf.IndexedSlices | None, scale: Any) -> tf.IndexedSlices | None:
    """`gradient` with its values divided by `scale`; None stays None."""
    if gradient is None:
        return None
    return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)


class _TfKeras(_Decaying):
    def build(self, var_list):
        others = self._sok_take(var_list)
        if others:  # Keras builds once; ordinary variables may come in a later call
            super().build(others)

    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        aggregate = kwargs.pop("experimental_aggregate_gradients", True)
        aggregate = aggregate and not skip_gradients_aggregation
        pairs = finite_gradients.without_decision(grads_and_vars)
        with tf.init_scope():
            self.build([v for _, v in pairs])
            if not hasattr(self, "_current_learning_rate"):
                self._compute_current_learning_rate()
        if graph_step.builds_v1_graph():
            # Without `name`, which Keras would use for new variables; they exist already.
            again = functools.partial(
                self.apply_gradients, pairs, experimental_aggregate_gradients=aggregate, **kwargs
            )
            return graph_step.as_op(again, name or self.name)
        self._sok_tell_missing(pairs)
        rate, step = self._sok_learning_rate(), self.iterations + 1
        _, other = self._sok_step(pairs, rate, step, aggregate)
        if not other:
            self._compute_current_learning_rate()  # sets `learning_rate` of a schedule
            return self.iterations.assign_add(1)
        if aggregate:  # over the replicas of a strategy
            other = super().aggregate_gradients(other)
        return super().apply_gradients(other, name, True, **kwargs)

    def aggregate_gradients(self, grads_and_vars):
        rate, step = self._sok_learning_rate(), self.iterations + 1
        return self._sok_aggregate(grads_and_vars, super().aggregate_gradients, rate, step)

    def minimize(self, loss, var_list, tape=None):
        if not graph_step.builds_v1_graph() or tape is not None:
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


class _V1(EmbeddingAware):
    def compute_gradients(self, loss, var_list=None, *args, **kwargs):
        # Keras 3 wraps a layer's variables, and v1 accepts only its own kinds.
        if var_list is not None:
            var_list = [unwrap(variable) for variable in tf.nest.flatten(var_list)]
        return super().compute_gradients(loss, var_list, *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        self._sok_take([v for _, v in pairs])
        if not any(g is not None for g, _ in pairs):
            return super().apply_gradients(pairs, global_step, name)  # raises TF's own error
        rate = getattr(self, "_lr", None)
        rate = self._call_if_callable(self._learning_rate if rate is None else rate)
        counter = self._sok_counter("steps")
        own = getattr(self, "own_step", None)  # for an optimizer that counts differently
        step = counter.read_value() + 1 if own is None else own()
        updates, other = self._sok_step(pairs, rate, step)
        if other:
            updates.append(super().apply_gradients(other, None))
        with tf.control_dependencies([*updates, step] if not tf.executing_eagerly() else []):
            updates = [counter.assign_add(1)]
            if global_step is not None:
                updates.append(global_step.assign_add(tf.ones([], global_step.dtype)))
            return tf.group(*updates, name=name or self.get_name())


def _checked_init(cls):
    """The stock class's constructor; afterwards it refuses numbers that no rule accepts."""

    @functools.wraps(cls.__init__)
    def init(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        try:
            rule = self._sok_rule()
        except ValueError:
            return  # a setting without a rule only matters once there is a table
        rule.check()

    return init


def knows_tables(optimizer: Any) -> bool:
    """Whether an optimizer can train embedding variables."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer if inner is None else inner, EmbeddingAware)


@functools.cache
def embedding_aware(cls: type) -> type:
    """A subclass of the stock optimizer class `cls` that also trains embedding variables."""
    if issubclass(cls, EmbeddingAware):
        return cls
    families = {"tf.compat.v1": _V1, "keras": _Keras3, "tf_keras": _TfKeras, "legacy": LegacyKeras}
    family = families.get(optimizer_family(cls) or "")
    if family is None:
        raise TypeError(
            "An optimizer of Keras 3, tf_keras or tf.compat.v1.train is required. "
            f"Received: {cls.__module__}.{cls.__qualname__}"
        )
    members = {"__module__": __name__, "__init__": _checked_init(cls)}
    # The legacy Adam and Adam have the same name; files must distinguish their subclasses.
    kind = "Legacy" if ".legacy." in cls.__module__ else ""
    if cls.__module__.partition(".")[0] not in _STOCK and hasattr(keras_optimizers(), cls.__name__):
        # Files of the stock class must not find a subclass of the same name, as Horovod's are.
        kind = cls.__module__.replace(".", "_") + "_"
    aware = type(f"EmbeddingAware{kind}{cls.__name__}", (family, cls), members)
    if family is not _V1:  # clones and saved models find the class by its name
        tf.keras.utils.register_keras_serializable("sok_like")(aware)
    return aware


def __getattr__(name: str) -> type:
    """The subclass of a Keras optimizer by its name in files, such as `EmbeddingAwareAdam`."""
    if name.startswith("EmbeddingAware") and hasattr(keras_optimizers(), name[14:]):
        return embedding_aware(getattr(keras_optimizers(), name[14:]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
