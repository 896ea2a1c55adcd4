"""Stock optimizers that also train embedding variables.

`embedding_aware(cls)` is a subclass of a stock optimizer class. It updates embedding variables by
the core's fused rule. It averages the ordinary gradients over ranks and leaves the other variables
to the stock class. There is one mixin for each family: Keras 3, tf_keras, its legacy optimizers,
tf.compat.v1.train.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_like.lookup import same_weights
from sok_like.lookup.local_variables import is_local
from sok_like.optimizers import graph_step, owner, same_on_ranks
from sok_like.optimizers.rules import OptimizerRule, rule_of
from sok_like.runtime import comm, finite, ops, turns
from sok_like.table.variable import as_embedding_variable, is_embedding_variable, unwrap


def split(pairs: Iterable[tuple[Any, Any]]) -> tuple[list, list]:
    """Splits (gradient, variable) pairs into embedding variables, unwrapped, and others."""
    embedding, other = [], []
    for gradient, variable in pairs:
        if is_embedding_variable(variable):
            embedding.append((gradient, unwrap(variable)))
        else:
            other.append((gradient, variable))
    return embedding, other


_OPTIONS = ("lazy", "average", "skip_nonfinite")


class EmbeddingAware:
    """The common part of all families. The state is in `_sok_*` attributes."""

    _sok_lazy = False
    _sok_average = True
    _sok_only_embeddings = False
    _sok_skip_nonfinite = False
    _sok_sums_rows = True
    # Whether all ranks take every step, whatever its variables are.
    _sok_steps_together = False

    @property
    def embedding_rule(self) -> OptimizerRule:
        """The core's rule for the optimizer's present settings."""
        rule = self._sok_rule()
        if not self._sok_lazy:
            return rule
        if rule.rule == "adam":
            return rule.replace("lazy_adam")
        return rule.replace(lazy=True) if rule.rule == "momentum" else rule

    def _sok_rule(self):
        return rule_of(self)

    @property
    def initializer(self) -> tf.Operation | None:
        """In a `tf.compat.v1` graph, the op that initializes the optimizer's own variables.

        State that belongs to rows is stored in the table and initialized with its row.
        """
        variables: Any = getattr(self, "variables")  # noqa: B009 (of the stock class)
        variables = list(variables() if callable(variables) else variables)
        # tf_keras does not list these.
        numbers = [getattr(self, "_learning_rate", None), *getattr(self, "_hyper", {}).values()]
        variables += [number for number in numbers if isinstance(number, tf.Variable)]
        values = [getattr(variable, "value", variable) for variable in variables]
        values = [
            value if isinstance(value, tf.Variable) else variable
            for value, variable in zip(values, variables, strict=True)
        ]
        return tf.group(*[value.initializer for value in values if value.initializer is not None])

    def get_config(self):
        config = super().get_config()
        for option in _OPTIONS:
            if getattr(self, f"_sok_{option}") != getattr(type(self), f"_sok_{option}"):
                config[f"sok_{option}"] = getattr(self, f"_sok_{option}")
        return config

    @classmethod
    def from_config(cls, config, **kwargs):
        config = dict(config)
        names = [f"sok_{option}" for option in _OPTIONS]
        options = {name: config.pop(name) for name in names if name in config}
        optimizer = super().from_config(config, **kwargs)
        for key, value in options.items():
            optimizer.__dict__[f"_{key}"] = value
        return optimizer

    def _sok_take(self, variables):
        """The variables that the stock class must train."""
        others = []
        for variable in variables:
            if is_embedding_variable(variable):
                continue
            if self._sok_only_embeddings:
                raise ValueError(
                    f"{type(self).__name__} trains embedding variables only; "
                    "sok.tf.keras.optimizers.Adam trains both kinds. "
                    f"Received: {variable!r}"
                )
            others.append(variable)
        return others

    def _sok_tell_missing(self, pairs):
        """Reports variables without a gradient, as stock optimizers do.

        Raises:
            ValueError: no variable has a gradient.
        """
        missing = [_path_of(variable) for gradient, variable in pairs if gradient is None]
        if missing and len(missing) == len(pairs):
            raise ValueError(f"No gradients provided for any variable. Received: {missing}")
        if missing:
            warnings.warn(
                f"Gradients do not exist for variables {missing}, which this step does not train. "
                "Does the loss depend on them, and was it computed within the tape?",
                stacklevel=3,
            )

    def _sok_update(self, pairs, learning_rate, step):
        """Updates EmbeddingVariables by fused rules, from their gradients; returns ops in a graph.

        One op updates all tables of one rule and device; it distributes them over threads.
        """
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not pairs:
            return []  # an optimizer without a rule for tables may train ordinary variables
        decaying = self.embedding_rule
        plain = decaying.replace(weight_decay=0.0)
        steps: dict[int, int] = collections.Counter()  # a variable given twice takes two steps
        calls: dict[Any, list] = {}
        for gradient, variable in pairs:
            if self._sok_skip_nonfinite:
                gradient = self._sok_finite(gradient, variable)
            rule = decaying if _decays(self, variable) else plain
            call = (rule, variable.device, steps[id(variable)])
            calls.setdefault(call, []).append((gradient, variable))
            steps[id(variable)] += 1
        # Plain gradient descent has no state beside the rows that another optimizer could use.
        owned = [] if plain.rule == "sgd" else [variable for _, variable in pairs]
        with tf.control_dependencies(owner.take(self, _name_of(self), owned)):
            return [rule.apply(tables, learning_rate, step) for (rule, *_), tables in calls.items()]

    def _sok_finite(self, gradient, variable):
        """The rows of a gradient without NaN and infinity; counts the others."""
        gradient, finite = ops.finite_rows(gradient)
        skipped = tf.size(finite, tf.int64) - tf.math.count_nonzero(finite)
        counted = self._sok_counter(f"skipped_{variable.table_name}").assign_add(skipped)
        with tf.control_dependencies([] if tf.executing_eagerly() else [counted]):
            return ops.masked(gradient, finite)

    def skipped_gradients(self, variable: Any) -> tf.Variable:
        """Number of this rank's keys whose gradient for `variable` was skipped, int64 scalar.

        Raises:
            TypeError: `variable` is not an EmbeddingVariable.
            ValueError: the optimizer was wrapped without `skip_nonfinite_gradients=True`.
        """
        table = as_embedding_variable(variable)
        if not self._sok_skip_nonfinite:
            raise ValueError(
                "`skipped_gradients` needs an optimizer of "
                "`sok.OptimizerWrapper(..., skip_nonfinite_gradients=True)`. "
                f"Received: {type(self).__name__} without"
            )
        return self._sok_counter(f"skipped_{table.table_name}")

    def _sok_counter(self, name):
        """An int64 counter: one variable per graph, like the optimizer's powers of beta."""
        counters = self.__dict__.setdefault("_sok_counters", {})
        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            if (graph, name) not in counters:
                with tf.device("CPU:0"):
                    counters[graph, name] = tf.Variable(
                        0, dtype=tf.int64, trainable=False, name=f"{_name_of(self)}/{name}"
                    )
        return counters[graph, name]

    def _sok_averages(self):
        """Whether this optimizer averages ordinary gradients over several ranks."""
        # A dmp.DistributedOptimizer around it has already done so.
        average = self._sok_average and not getattr(self, "dmp_averages", False)
        return average and comm.current_or_single().world_size > 1

    def _sok_averaged(self, pairs, learning_rate, step):
        """Ordinary pairs with averaged gradients; raises if the ranks have drifted apart."""
        pairs = [(g, v) for g, v in pairs if g is not None]
        if not pairs or not self._sok_averages():
            return pairs
        communicator = comm.current()
        rank, world_size = communicator.rank, communicator.world_size
        # Shards of dense tables (dist_model_parallel) belong to one rank, like tables.
        local = [is_local(variable) for _, variable in pairs]
        shared = [None if own else g for (g, _), own in zip(pairs, local, strict=True)]
        variables = [v for (_, v), own in zip(pairs, local, strict=True) if not own]
        if not variables:
            return pairs
        mine = same_on_ranks.statement(learning_rate, step, variables, rank, world_size)
        name = "sok_gradients"
        *averaged, statements = turns.in_turn(
            lambda: communicator.average([*shared, mine], name), name, communicator
        )
        with tf.control_dependencies(same_weights.check(statements * world_size, variables)):
            return [
                (g if own else tf.nest.map_structure(tf.identity, mean, expand_composites=True), v)
                for (g, v), own, mean in zip(pairs, local, averaged, strict=True)
            ]

    def _sok_compared(self, pairs, learning_rate, step, averages=None):
        """Compares learning rates of ranks if `_sok_averaged` does not; a context for updates.

        If a table or a shard of one is trained, all ranks are in this step, as its rows are on all
        of them. Other variables do not guarantee that.
        """
        variables = [variable for gradient, variable in pairs if gradient is not None]
        on_all_ranks = [is_local(variable) for variable in variables]
        averages = self._sok_averages() if averages is None else averages
        told = averages and not all(on_all_ranks)
        due = not told and (self._sok_steps_together or any(on_all_ranks))
        if comm.current_or_single().world_size == 1 or not due:
            return contextlib.nullcontext()
        by_steps = _follows_schedule(self) or graph_step.builds_v1_graph()
        compared = None if by_steps else self._sok_counter("rate_compared")
        checks = same_on_ranks.compare(learning_rate, step, compared, comm.current())
        return tf.control_dependencies([] if tf.executing_eagerly() else checks)


def _follows_schedule(optimizer):
    """Whether a Keras optimizer computes its learning rate from its step."""
    hyper = getattr(optimizer, "_hyper", {})  # of tf_keras' legacy optimizers
    rate = hyper.get("learning_rate", getattr(optimizer, "_learning_rate", None))
    decays = bool(getattr(optimizer, "_initial_decay", 0.0))
    return decays or isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)


def _name_of(optimizer):
    named = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    return optimizer.get_name() if named else getattr(optimizer, "name", "optimizer")


def _path_of(variable):
    return unwrap(variable).table_name if is_embedding_variable(variable) else variable.name


def _decays(optimizer, variable):
    if not getattr(optimizer, "weight_decay", None):
        return False
    with variable.asked_by_known_optimizer():
        return optimizer._use_weight_decay(variable)


class _Keras3(EmbeddingAware):
    def __setattr__(self, name, value):
        # Keras' LossScaleOptimizer switches off the scaling of the optimizer that it wraps. The
        # stock class cannot handle gradients by key; raise here, in `compile`, not in step one.
        if name == "loss_scale_factor" and not getattr(self, "_sok_scaling_allowed", True):
            raise ValueError(
                "Keras' LossScaleOptimizer, which `compile` puts around an optimizer under "
                "`mixed_float16`, cannot handle embedding variables. Give compile "
                "`sok.OptimizerWrapper(tf.keras.optimizers.LossScaleOptimizer(optimizer))`, or "
                "choose `mixed_bfloat16`, which needs no loss scaling."
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
        embedding, other = split(pairs)
        if self.loss_scale_factor is not None:
            embedding = [(unscaled(g, self.loss_scale_factor), v) for g, v in embedding]
        rate, step = self.learning_rate, self._iterations + 1
        with self._sok_compared(pairs, rate, step):
            self._sok_update(embedding, rate, step)
        # Unlike the others, Keras 3 would square the parts of a row's gradient one by one.
        other = self._sok_averaged(other, rate, step)
        if self._sok_sums_rows:
            other = [(_summed(g), v) for g, v in other]
        if other:
            super().apply(*zip(*other, strict=True))
        else:
            self._iterations.assign_add(1)


def _summed(gradient):
    return comm.distinct(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def unscaled(gradient: tf.IndexedSlices | None, scale: Any) -> tf.IndexedSlices | None:
    """`gradient` with its values divided by `scale`; None stays None."""
    if gradient is None:
        return None
    return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)


class _TfKeras(EmbeddingAware):
    def build(self, var_list):
        others = self._sok_take(var_list)
        if others:  # Keras builds once; ordinary variables may come in a later call
            super().build(others)

    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        aggregate = kwargs.pop("experimental_aggregate_gradients", True)
        aggregate = aggregate and not skip_gradients_aggregation
        pairs = finite.without_decision(grads_and_vars)
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
        embedding, other = split(pairs)
        rate, step = self._sok_learning_rate(), self.iterations + 1
        with self._sok_compared(pairs, rate, step, aggregate and self._sok_averages()):
            self._sok_update(embedding, rate, step)
        if aggregate:
            other = self._sok_averaged(other, rate, step)
        other = [(g, v) for g, v in other if g is not None]
        if not other:
            self._compute_current_learning_rate()  # sets `learning_rate` of a schedule
            return self.iterations.assign_add(1)
        if aggregate:  # over the replicas of a strategy
            other = super().aggregate_gradients(other)
        return super().apply_gradients(other, name, True, **kwargs)

    def aggregate_gradients(self, grads_and_vars):
        """tf_keras' LossScaleOptimizer calls this, and then decides whether to take the step."""
        embedding, other = split(grads_and_vars)
        other = self._sok_averaged(other, self._sok_learning_rate(), self.iterations + 1)
        other = super().aggregate_gradients(other) if other else other
        return finite.with_decision([*embedding, *other], comm.current_or_single())

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
        embedding, other = split(pairs)
        if not any(g is not None for g, _ in pairs):
            return super().apply_gradients(pairs, global_step, name)  # raises TF's own error
        rate = getattr(self, "_lr", None)
        rate = self._call_if_callable(self._learning_rate if rate is None else rate)
        counter = self._sok_counter("steps")
        own = getattr(self, "own_step", None)  # for an optimizer that counts differently
        step = counter.read_value() + 1 if own is None else own()
        with self._sok_compared(pairs, rate, step):
            updates = self._sok_update(embedding, rate, step)
        if any(g is not None for g, _ in other):
            updates.append(super().apply_gradients(self._sok_averaged(other, rate, step), None))
        updates = [op for op in updates if op is not None]
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
    """A subclass of the stock optimizer class `cls` that also trains embedding variables.

    Raises:
        TypeError: `cls` belongs to none of the four families.
    """
    if issubclass(cls, EmbeddingAware):
        return cls
    if issubclass(cls, tf.compat.v1.train.Optimizer):
        family: type = _V1
    elif any(base.__module__.startswith("keras.src.optimizers") for base in cls.__mro__):
        family = _Keras3
    elif any(base.__module__ == "tf_keras.src.optimizers.optimizer" for base in cls.__mro__):
        family = _TfKeras
    elif any(base.__name__ == "OptimizerV2" for base in cls.__mro__):
        from sok_like.optimizers.legacy_keras import LegacyKeras as family
    else:
        raise TypeError(
            "An optimizer of Keras 3, tf_keras or tf.compat.v1.train is required. "
            f"Received: {cls.__module__}.{cls.__qualname__}"
        )
    members = {"__module__": __name__, "__init__": _checked_init(cls)}
    # The legacy Adam and Adam have the same name; files must distinguish their subclasses.
    kind = "Legacy" if ".legacy." in cls.__module__ else ""
    aware = type(f"EmbeddingAware{kind}{cls.__name__}", (family, cls), members)
    if family is not _V1:  # clones and saved models find the class by its name
        tf.keras.utils.register_keras_serializable("sok_like")(aware)
    return aware


def __getattr__(name: str) -> type:
    """The subclass of a Keras optimizer by its name in files, such as `EmbeddingAwareAdam`."""
    if name.startswith("EmbeddingAware") and hasattr(tf.keras.optimizers, name[14:]):
        return embedding_aware(getattr(tf.keras.optimizers, name[14:]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
