"""Compares during training what an optimizer must have in common on all ranks.

Each rank states its learning rate, its step and, once, two sums of every ordinary variable. The
statements travel with the averaged gradients, so they need no collective of their own.

If no gradients are averaged, as in a model with tables only, `compare` exchanges learning rate and
step separately, but only at a rank's first step with another learning rate. If it changes on one
rank only, the other ranks are in another call, and all ranks raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup.same_weights import check, sums_of
from sok_like.runtime.ranks import exchange_order
from sok_like.runtime.ranks.comm import Communicator


def statement(rate: Any, step: Any, variables: Sequence[Any], rank: int, world_size: int) -> Any:
    """Zeros with this rank's statement in its own row; the sum over ranks has all statements.

    float32 `[world_size, 2 + 2 * len(variables)]`. Steps count from 1. `variables` are ordinary
    ones before the update, the same on all ranks.
    """
    step = tf.cast(step, tf.int64)
    # At the second step: programs often broadcast variables after the first one.
    sums = _if(
        tf.equal(step, 2),
        lambda: tf.concat([sums_of(variable) for variable in variables], 0),
        lambda: tf.zeros([2 * len(variables)]),
    )
    rate, step = tf.cast(rate, tf.float32), tf.cast(step % 2**24, tf.float32)
    own_row = tf.concat([tf.reshape(rate, [1]), tf.reshape(step, [1]), sums], 0)
    is_mine = tf.equal(tf.range(world_size), rank)
    return tf.where(is_mine[:, tf.newaxis], own_row[tf.newaxis], 0.0)


def compare(rate: Any, step: Any, compared: Any, communicator: Communicator) -> list:
    """Compares learning rate and step over ranks in an exchange of its own, if it is time.

    `compared` is an int64 variable with the bits of the learning rate that was compared last. It
    is None if the rate comes from a schedule, or in a `tf.compat.v1` graph: exchanges cannot
    depend on a condition there, so every step compares.

    All ranks raise InvalidArgumentError if they differ, FailedPreconditionError if some are in
    another call. Returns what an update must wait for in a graph.
    """
    rate, step = tf.cast(rate, tf.float32), tf.cast(step, tf.int64)
    bits = tf.cast(tf.bitcast(rate, tf.int32), tf.int64)

    def exchange():
        notes, _ = exchange_order.exchange_notes(
            tf.stack([bits, step]), [], communicator, "learning_rate_changed_on_this_rank"
        )
        by_rank = tf.reshape(notes, [communicator.world_size, 2])
        rates = tf.bitcast(tf.cast(by_rank[:, 0], tf.int32), tf.float32)
        steps = tf.cast(by_rank[:, 1] % 2**24, tf.float32)
        done = check(tf.stack([rates, steps], 1), [])
        if compared is not None:
            done.append(compared.assign(bits))
        with tf.control_dependencies([] if tf.executing_eagerly() else done):
            return tf.constant(True)

    if tf.executing_eagerly() or tf.inside_function():
        due = tf.equal(step % 16, 1)  # a schedule changes the learning rate at every step
        if compared is not None:
            due = tf.not_equal(compared, bits)
        return [_if(due, exchange, lambda: tf.constant(True))]
    return [exchange()]


def _if(condition, this, that):
    if tf.executing_eagerly():
        return this() if condition else that()
    return tf.cond(condition, this, that)
