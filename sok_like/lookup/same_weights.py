"""Compares ordinary variables over ranks while tables are trained, whoever trains the variables.

A table's gradient is a collective, so all ranks take part in it. The tape that asks for it names
the ordinary variables that are trained beside the table. Optimizers of this package average their
gradients over ranks; the program may do so, too. If nothing does, each rank trains
different weights, and none would notice. So at a few steps the ranks compare two sums of each of
these variables.

    step       1   2   3   4   ..   8   ..   16   ..
    compared       x   x   x        x        x          before the step is taken

Not at step 1: some programs broadcast variables after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.local_variables import is_local
from sok_like.runtime.framework import hooks
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import exchange_order
from sok_like.runtime.ranks.comm import Communicator

# Relative, for these sums: hosts with different processors may differ in the last bits.
TOLERANCE = 1e-5


class _Asked(threading.local):
    """The calls of `GradientTape.gradient` in progress in this thread, the innermost last."""

    def __init__(self):
        self.calls: list[tuple[tf.GradientTape, Any, Any]] = []


_asked = _Asked()


def _gradient(own, self, target, sources, *args, **kwargs):
    _asked.calls.append((self, target, sources))
    try:
        return own(self, target, sources, *args, **kwargs)
    finally:
        _asked.calls.pop()


def compare(communicator: Communicator) -> list[tf.Tensor]:
    """Compares the ordinary variables of the tape that is taking a gradient, if it is time.

    Call it where the gradient of a lookup is built. Without a tape around it (`tf.gradients`, a
    function within the tape) and in a v1 graph it compares nothing. Returns tensors that later ops
    must wait for. Errors are raised on all ranks.
    """
    variables = _trained_variables()
    if not variables:
        return []
    step = tf.identity(_counter(variables[0]).assign_add(1, read_value=True))
    is_power = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
    due = (step > 1) & (is_power | tf.equal(step, 3))

    def exchange():
        # One op for all variables: TensorFlow's own ops would be ten per variable to trace.
        values = tf.numpy_function(_sums, [as_tf_table(v) for v in variables], tf.int64)
        values = tf.ensure_shape(values, [2 * len(variables)])
        name = f"comparison_of_{len(variables)}_ordinary_variables"
        notes, _ = exchange_order.exchange_notes(values, [], communicator, name)
        by_rank = tf.reshape(notes, [communicator.world_size, 2 * len(variables)])
        by_rank = tf.bitcast(tf.cast(by_rank, tf.int32), tf.float32)
        # Learning rates and steps, which come first, matter to optimizers only.
        with tf.control_dependencies(check(tf.pad(by_rank, [[0, 0], [2, 0]]), variables)):
            return tf.constant(True)

    if tf.executing_eagerly():
        return [exchange()] if due else []
    return [tf.cond(due, exchange, lambda: tf.constant(True))]


def _sums(*values):
    """`sums_of` for arrays, as the bits of float32."""
    sums = []
    for array in values:
        flat = np.asarray(array).astype(np.float64).ravel()
        sums += [flat @ np.cos(np.arange(1, flat.size + 1)), np.abs(flat).sum()]
    return np.array(sums, np.float32).view(np.int32).astype(np.int64)


def check(statements: Any, variables: list[Any]) -> list:
    """Raises unless all ranks' statements `[world_size, ...]` agree; in a graph returns the op."""
    with tf.device("CPU:0"):  # the op's only device, even if gradients are averaged on another
        op = libraries.ops().sok_compare_statements(
            statements=statements,
            variables=[getattr(v, "path", v.name) for v in variables],
            tolerance=TOLERANCE,
        )
    return [] if op is None else [op]


def sums_of(variable: Any) -> tf.Tensor:
    """float32 `[2]`: a sum that depends on the order of elements, and the sum of absolutes."""
    values = tf.reshape(tf.cast(as_tf_table(variable), tf.float64), [-1])
    weights = tf.cos(tf.range(1, tf.size(values) + 1, dtype=tf.float64))
    sums = [tf.reduce_sum(values * weights), tf.reduce_sum(tf.abs(values))]
    return tf.cast(tf.stack(sums), tf.float32)


def _trained_variables():
    """The ordinary variables of the tape whose gradient is being taken; only once per tape."""
    if not _asked.calls or not tf.compat.v1.executing_eagerly_outside_functions():
        return []
    tape, target, sources = _asked.calls[-1]
    if hasattr(tape, "_sok_compared"):
        return []
    if not tf.executing_eagerly():
        # The gradient of a loop or branch can use only variables that its body uses.
        graph = tf.compat.v1.get_default_graph()
        targets = tf.nest.flatten(target, expand_composites=True)
        if any(getattr(target, "graph", None) is not graph for target in targets):
            return []
    variables = list(filter(_is_ordinary, tf.nest.flatten(sources)))
    # If the program asks for tables only: all that the tape watches.
    variables = variables or list(filter(_is_ordinary, tape.watched_variables()))
    if variables:
        tape._sok_compared = True
    return variables


def _is_ordinary(source):
    if not isinstance(getattr(source, "_value", source), tf.Variable) or is_local(source):
        return False
    # Variables of a distribution follow its own rules.
    return getattr(source, "_sok_distribution", None) is None


def _counter(variable):
    """Number of gradients taken beside a table, int64, counted at their first variable."""
    table = as_tf_table(variable)
    if not hasattr(table, "_sok_gradients_taken"):
        with tf.init_scope(), tf.device("CPU:0"):
            counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradients_taken")
        object.__setattr__(table, "_sok_gradients_taken", counter)
    return table._sok_gradients_taken


def comparison() -> Callable[[Communicator], list[tf.Tensor]]:
    """`compare`, for a lookup on several ranks, whose tape it must know; others wrap nothing."""
    hooks.at_init(_watch_tapes)
    return compare


def _watch_tapes():
    why = "variables trained beside a table are compared"
    hooks.wrap(tf.GradientTape, "gradient", _gradient, why)
