"""The stages of a step: each takes (gradient, variable) pairs and returns those still to train.

    average          ordinary gradients over ranks, for `sok.OptimizerWrapper`; moving statistics
    report_missing   warns of variables without a gradient
    train_tables     updates embedding variables by the core's fused rule
    sum_rows         sums the parts of a row's gradient, for Keras 3

`dist_model_parallel` and `distribution` have others in place of `average`; `families` runs them.

Each rank states its learning rate, its step and, once, two sums of every ordinary variable, for
ranks to compare. The statements travel with the averaged gradients. If there are none, as in a
model with tables only, learning rate and step have an exchange of their own, but only at a rank's
first step with another learning rate. If it changes on one rank only, the other ranks are in
another call, and all ranks raise.
"""

import collections
import contextlib
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.local_variables import is_local
from sok_like.optimizers import owner
from sok_like.runtime.framework import hooks, running_keras
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.variable import is_embedding_variable, unwrap

Pairs = list[tuple[Any, Any]]
# Layers of batch normalization that have run in training, by `id`: those with variables to train.
_normalizations: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# `layers`: those without any, which this thread has run since gradients were averaged.
_untrained_normalizations = threading.local()


class Step:
    """What the stages share: whether gradients are still to be averaged, and by what multiplied."""

    def __init__(self, optimizer: Any, *, average: bool = True, scale: Any = None):
        self._optimizer = optimizer
        self.average, self.scale = average, scale
        self.updates: list = []  # in a graph, ops that have updated tables
        self.scopes = contextlib.ExitStack()  # closed when the stock class has taken its step
        self.rates_compared = False  # whether the ranks have told each other their learning rates

    @functools.cached_property
    def learning_rate(self) -> Any:
        """The optimizer's learning rate in this step."""
        return self._optimizer._sok_learning_rate()

    @functools.cached_property
    def number(self) -> Any:
        """The number of this step, counting from 1."""
        return self._optimizer._sok_step_number()


def average(optimizer: Any, pairs: Pairs, step: Step) -> Pairs:
    """Averages ordinary gradients over ranks; raises if the ranks have drifted apart."""
    communicator = comm.current_or_single()
    world_size = communicator.world_size
    # Tables, and shards of dense tables (dist_model_parallel), belong to one rank.
    is_shared = [g is not None and not is_local(v) for g, v in pairs]
    may_average = step.average and optimizer._sok_average and world_size > 1
    if not may_average or not (any(is_shared) or vars(_untrained_normalizations)):
        return pairs
    shared = [g if is_one else None for (g, _), is_one in zip(pairs, is_shared, strict=True)]
    variables = [v for (_, v), is_one in zip(pairs, is_shared, strict=True) if is_one]
    compared, names = replicas.with_untrained(variables, running_keras.model())
    shared.append(_statement(step.learning_rate, step.number, compared, communicator))
    *means, statements = average_with_statistics(shared, variables, communicator, "sok_gradients")
    step.rates_compared = True
    with tf.control_dependencies(replicas.check(statements * world_size, names)):
        return [
            (tf.nest.map_structure(tf.identity, mean, expand_composites=True) if is_one else g, v)
            for (g, v), is_one, mean in zip(pairs, is_shared, means, strict=True)
        ]


def report_missing(optimizer: Any, pairs: Pairs, step: Step) -> Pairs:
    """Reports variables without a gradient, as stock optimizers do."""
    missing = [
        unwrap(variable).table_name if is_embedding_variable(variable) else variable.name
        for gradient, variable in pairs
        if gradient is None
    ]
    if missing and len(missing) == len(pairs):
        raise ValueError(f"No gradients provided for any variable. Received: {missing}")
    if missing:
        warnings.warn(
            f"Gradients do not exist for variables {missing}, which this step does not train. "
            "Does the loss depend on them, and was it computed within the tape?",
            stacklevel=5,
        )
    return pairs


def sum_rows(optimizer: Any, pairs: Pairs, step: Step) -> Pairs:
    """Sums what a row has from several lookups: Keras 3 would square the parts one by one."""
    return [(comm.distinct(gradient), variable) for gradient, variable in pairs]


def train_tables(optimizer: Any, pairs: Pairs, step: Step) -> Pairs:
    """Updates the tables among the pairs; returns the other pairs that have a gradient."""
    own, pairs = owner.divide(optimizer, pairs)
    for of_table, its_pairs in own:
        its_step = Step(of_table, scale=step.scale)
        its_step.number = step.number
        train_tables(of_table, its_pairs, its_step)
        step.updates += its_step.updates
    pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    tables = [(unscaled(g, step.scale), unwrap(v)) for g, v in pairs if is_embedding_variable(v)]
    with _compared_rates(optimizer, [variable for _, variable in pairs], step):
        if tables:  # an optimizer without a rule for tables may train ordinary variables
            step.updates += _update(optimizer, tables, step)
    return [pair for pair in pairs if not is_embedding_variable(pair[1])]


def unscaled(gradient: tf.IndexedSlices | None, scale: Any) -> tf.IndexedSlices | None:
    """`gradient` with its values divided by `scale`; unchanged if one of them is None."""
    if gradient is None or scale is None:
        return gradient
    return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)


def _update(optimizer, tables, step):
    """Updates tables by fused rules, one op for all of one rule and device; returns them."""
    decaying = optimizer.embedding_rule
    plain = decaying.replace(weight_decay=0.0)
    steps: dict[int, int] = collections.Counter()  # a variable given twice takes two steps
    calls: dict[Any, list] = {}
    for gradient, variable in tables:
        if optimizer._sok_skip_nonfinite:
            gradient = _finite_rows(optimizer, gradient, variable)
        rule = decaying if _decays(optimizer, variable) else plain
        call = (rule, variable.device, steps[id(variable)])
        calls.setdefault(call, []).append((gradient, variable))
        steps[id(variable)] += 1
    # Plain gradient descent has no state beside the rows that another optimizer could use.
    owned = [] if plain.rule == "sgd" else [variable for _, variable in tables]
    with tf.control_dependencies(owner.take(optimizer, owned)):
        updates = [
            rule.apply(tables, step.learning_rate, step.number)
            for (rule, *_), tables in calls.items()
        ]
    return [op for op in updates if op is not None]


def _decays(optimizer, variable):
    if not getattr(optimizer, "weight_decay", None):
        return False
    # From Keras 3.16 on, `_use_weight_decay` knows only what `build` was given: no tables.
    is_excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    with variable.asked_by_known_optimizer():
        return not is_excluded(variable) if is_excluded else optimizer._use_weight_decay(variable)


def _finite_rows(optimizer, gradient, variable):
    """The rows of a gradient, each key once, without NaN and infinity; counts the others."""
    gradient = comm.distinct(gradient)
    finite = tf.reduce_all(tf.math.is_finite(gradient.values), axis=1)
    skipped = tf.size(finite, tf.int64) - tf.math.count_nonzero(finite)
    counted = optimizer._sok_counter(f"skipped_{variable.table_name}").assign_add(skipped)
    with tf.control_dependencies([counted]):
        keys = tf.boolean_mask(gradient.indices, finite)
        setattr(keys, comm.UNIQUE, True)
        return tf.IndexedSlices(tf.boolean_mask(gradient.values, finite), keys)


def _compared_rates(optimizer, variables, step):
    """Compares learning rates, unless averaging has done so; a context for updates."""
    # If a table or a shard of one is trained, all ranks are in this step, as its rows are on all
    # of them. Other variables do not guarantee that.
    on_all_ranks = optimizer._sok_steps_together or any(map(is_local, variables))
    communicator = comm.current_or_single()
    if communicator.world_size == 1 or step.rates_compared or not on_all_ranks:
        return contextlib.nullcontext()
    hyper = getattr(optimizer, "_hyper", {})  # of tf_keras' legacy optimizers
    rate = hyper.get("learning_rate", getattr(optimizer, "_learning_rate", None))
    by_schedule = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
    by_schedule |= bool(getattr(optimizer, "_initial_decay", 0.0))
    is_compared = not by_schedule and not builds_v1_graph()
    compared = optimizer._sok_counter("rate_compared") if is_compared else None
    checks = _compare_rates(step.learning_rate, step.number, compared, communicator)
    return tf.control_dependencies(checks)


def _statement(rate, step, variables, communicator):
    """Zeros `[world_size, 2 + 2 * len(variables)]`, with this rank's statement in its own row."""
    step = tf.cast(step, tf.int64)
    # At the second step: programs often broadcast variables after the first one.
    sums = tf.cond(
        tf.equal(step, 2),
        lambda: replicas.sums_of(variables),
        lambda: tf.zeros([2 * len(variables)]),
    )
    rate, step = tf.cast(rate, tf.float32), tf.cast(step % 2**24, tf.float32)
    own_row = tf.concat([tf.reshape(rate, [1]), tf.reshape(step, [1]), sums], 0)
    is_mine = tf.equal(tf.range(communicator.world_size), communicator.rank)
    return tf.where(is_mine[:, tf.newaxis], own_row[tf.newaxis], 0.0)


def _compare_rates(rate, step, compared, communicator):
    """Compares learning rate and step over ranks in an exchange of its own, if it is time."""
    # `compared` is an int64 variable with the bits of the learning rate that was compared last. It
    # is None if the rate comes from a schedule, or in a `tf.compat.v1` graph: exchanges cannot
    # depend on a condition there, so every step compares. Returns what an update must wait for.
    rate, step = tf.cast(rate, tf.float32), tf.cast(step, tf.int64)
    bits = tf.cast(tf.bitcast(rate, tf.int32), tf.int64)

    def exchange():
        own, name = tf.stack([bits, step]), "learning_rate_changed_on_this_rank"
        notes, _ = exchange_order.exchange_notes(own, communicator, name)
        by_rank = tf.reshape(notes, [communicator.world_size, 2])
        rates = tf.bitcast(tf.cast(by_rank[:, 0], tf.int32), tf.float32)
        steps = tf.cast(by_rank[:, 1] % 2**24, tf.float32)
        done = replicas.check(tf.stack([rates, steps], 1), [])
        if compared is not None:
            done.append(compared.assign(bits))
        with tf.control_dependencies(done):
            return tf.constant(True)

    if builds_v1_graph():
        return [exchange()]
    due = tf.equal(step % 16, 1)  # a schedule changes the learning rate at every step
    if compared is not None:
        due = tf.not_equal(compared, bits)
    return [tf.cond(due, exchange, lambda: tf.constant(True))]


def builds_v1_graph() -> bool:
    """Whether ops made now belong to a graph that a session will run."""
    return not tf.executing_eagerly() and not tf.inside_function()


def as_op(step: Callable[[], Any], name: str) -> tf.Operation:
    """A Keras optimizer's step as one op of a `tf.compat.v1` graph, whose variables exist."""
    # A session runs only what the fetched op depends on, and would drop updates one by one.

    def take_step():
        step()
        return tf.constant(True)

    # A function always runs as a whole, whichever of its results is fetched.
    return tf.group(tf.function(take_step, autograph=False)(), name=name)


def average_with_statistics(
    gradients: Sequence[Any], variables: Sequence[Any], communicator: comm.Communicator, name: str
) -> list:
    """`Communicator.average`, also of the moving statistics of the layers in this step.

        BatchNormalization.call in training   moves its statistics towards those of the own batch
        the step's gradients are averaged     and so are, in the same message, these statistics

    They move by a linear rule, so their mean over ranks moves towards the mean over ranks. All
    ranks predict with the same statistics, and a file has those of all samples.
    """
    # A step is known by the variables that it trains, because a `tf.function` within it calls no
    # layer again. A layer without scale and center belongs to the step that follows its call.
    place = {id(as_tf_table(variable)): i for i, variable in enumerate(variables, 1)}
    in_step = {}
    for layer in list(_normalizations.values()):
        if trained := [i for v in layer.trainable_weights if (i := place.get(id(as_tf_table(v))))]:
            in_step[min(trained)] = layer
    layers = [in_step[i] for i in sorted(in_step)]
    layers += vars(_untrained_normalizations).pop("layers", {}).values()
    moved = [as_tf_table(weight) for layer in layers for weight in layer.non_trainable_weights]
    values = [tf.identity(variable) for variable in moved]
    means = exchange_order.collective_in_turn(communicator, "average", [*gradients, *values], name)
    for variable, mean in zip(moved, means[len(gradients) :], strict=True):
        variable.assign(mean)
    return means[: len(gradients)]


def _call_normalization(own, self, inputs, *args, **kwargs):
    arguments = inspect.signature(own).bind(self, inputs, *args, **kwargs).arguments
    training = arguments.get("training")
    in_training = self.trainable and (tf.is_tensor(training) or bool(training))
    # In a `tf.compat.v1` graph the program runs the updates; a distribution has rules of its own.
    is_ours = in_training and not builds_v1_graph() and not hasattr(self, "_sok_distribution")
    if is_ours and comm.current_or_single().world_size > 1:
        if getattr(self, "synchronized", False):
            raise NotImplementedError(
                "Statistics of the whole batch need `sok.distribution.DataParallel`. Elsewhere a "
                "rank normalizes by its own batch, and moving statistics are averaged over ranks. "
                f"Received: synchronized=True on layer '{self.name}'"
            )
        object.__setattr__(self, replicas.AVERAGED, True)  # bypasses Keras' tracking of attributes
        if self.trainable_weights:
            _normalizations[id(self)] = self
        else:
            vars(_untrained_normalizations).setdefault("layers", {})[id(self)] = self
    return own(self, inputs, *args, **kwargs)


@hooks.behind(hooks.RANKS)
def _wrap_normalization():
    lineage = tf.keras.layers.BatchNormalization.__mro__
    normalization = next(cls for cls in lineage if "call" in vars(cls))
    why = "moving statistics are averaged over ranks with the step's gradients"
    hooks.wrap(normalization, "call", _call_normalization, why)
