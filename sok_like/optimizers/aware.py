"""The step of an optimizer that trains embedding variables, for all families of optimizers.

It updates embedding variables by the core's fused rule, averages the ordinary gradients over ranks,
and leaves the other variables to the stock class.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from sok_like.lookup import same_weights
from sok_like.lookup.local_variables import is_local
from sok_like.optimizers import graph_step, owner, per_table, same_on_ranks
from sok_like.optimizers.rules import OptimizerRule, rule_of
from sok_like.runtime import ops
from sok_like.runtime.ranks import comm, exchange_order, finite_gradients
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
    _sok_tables: Mapping[str, Any] = {}  # optimizers of single tables, see `per_table`
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
        if self._sok_tables:
            config["sok_tables"] = per_table.to_config(self._sok_tables)
        return config

    @classmethod
    def from_config(cls, config, **kwargs):
        config = dict(config)
        tables = per_table.from_config(config.pop("sok_tables", {}))
        names = [f"sok_{option}" for option in _OPTIONS]
        options = {name: config.pop(name) for name in names if name in config}
        optimizer = super().from_config(config, **kwargs)
        for key, value in options.items():
            optimizer.__dict__[f"_{key}"] = value
        optimizer.__dict__["_sok_tables"] = tables
        return optimizer

    def optimizer_of(self, table: str) -> Any:
        """The optimizer of a table, as in the dictionary of `sok.OptimizerWrapper`.

        Its `learning_rate` can be read and set.

        Args:
            table: The table's name.
        """
        key = per_table.key_of(self._sok_tables, table)
        return self if key is None else self._sok_tables[key]

    def _sok_take(self, variables):
        """The variables that the stock class must train."""
        others = []
        variables = list(variables)
        per_table.check_keys(self, variables)
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
        """Reports variables without a gradient, as stock optimizers do."""
        missing = [_path_of(variable) for gradient, variable in pairs if gradient is None]
        if missing and len(missing) == len(pairs):
            raise ValueError(f"No gradients provided for any variable. Received: {missing}")
        if missing:
            warnings.warn(
                f"Gradients do not exist for variables {missing}, which this step does not train. "
                "Does the loss depend on them, and was it computed within the tape?",
                stacklevel=3,
            )

    def _sok_step(self, pairs, learning_rate, step, average=True):
        """Trains the tables among (gradient, variable) pairs.

        Args:
            average: Whether to average the ordinary gradients, if the optimizer does so at all.

        Returns:
            Ops of the updates, in a graph; and the pairs with which the stock class must go on.
        """
        own, pairs = per_table.divide(self, pairs)
        updates = []
        for optimizer, of_table in own:
            rate = optimizer._sok_learning_rate()
            updates += optimizer._sok_step(of_table, rate, step, average)[0]
        embedding, other = split(pairs)
        with self._sok_compare_rates(pairs, learning_rate, step, average):
            updates += self._sok_update(embedding, learning_rate, step)
        if average:
            other = self._sok_average_gradients(other, learning_rate, step)
        return [op for op in updates if op is not None], [(g, v) for g, v in other if g is not None]

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
        counts = self.optimizer_of(table.table_name)
        return counts._sok_counter(f"skipped_{table.table_name}")

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

    def _sok_must_average(self):
        """Whether this optimizer averages ordinary gradients over several ranks."""
        # A dmp.DistributedOptimizer around it has already done so.
        average = self._sok_average and not getattr(self, "dmp_averages", False)
        return average and comm.current_or_single().world_size > 1

    def _sok_average_gradients(self, pairs, learning_rate, step):
        """Ordinary pairs with averaged gradients; raises if the ranks have drifted apart."""
        pairs = [(g, v) for g, v in pairs if g is not None]
        if not pairs or not self._sok_must_average():
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
        *averaged, statements = exchange_order.collective_in_turn(
            communicator, "average", [*shared, mine], "sok_gradients"
        )
        with tf.control_dependencies(same_weights.check(statements * world_size, variables)):
            return [
                (g if own else tf.nest.map_structure(tf.identity, mean, expand_composites=True), v)
                for (g, v), own, mean in zip(pairs, local, averaged, strict=True)
            ]

    def _sok_aggregate(self, grads_and_vars, own, learning_rate, step):
        """What tf_keras' LossScaleOptimizer asks for before it decides whether to take the step.

        `own` is the stock method, which sums over the replicas of a strategy. Gradients are summed
        by key: parts may be finite, and their sum not.
        """
        embedding, other = split(grads_and_vars)
        embedding = [(comm.distinct(g), v) for g, v in embedding]
        other = self._sok_average_gradients(other, learning_rate, step)
        other = list(own(other)) if other else other
        return finite_gradients.with_decision([*embedding, *other], comm.current_or_single())

    def _sok_compare_rates(self, pairs, learning_rate, step, average):
        """Compares learning rates, unless averaging does; a context for updates.

        If a table or a shard of one is trained, all ranks are in this step, as its rows are on all
        of them. Other variables do not guarantee that.
        """
        variables = [variable for gradient, variable in pairs if gradient is not None]
        on_all_ranks = [is_local(variable) for variable in variables]
        told = average and self._sok_must_average() and not all(on_all_ranks)
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
    # From Keras 3.16 on, `_use_weight_decay` knows only what `build` was given: no tables.
    is_excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    with variable.asked_by_known_optimizer():
        return not is_excluded(variable) if is_excluded else optimizer._use_weight_decay(variable)
