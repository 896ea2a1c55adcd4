"""L1 and L2 penalties of sharded variables: each rank's part of the sum, summed over ranks."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from sok_like.distribution.collectives import summed
from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.planner import readers
from sok_like.runtime import hooks


def penalties_of_shards() -> contextlib.ExitStack:
    """A scope in which these penalties do not gather sharded variables.

    Other penalties need whole values, and gather them.
    """
    stack = contextlib.ExitStack()
    for name in readers.ADDITIVE:
        why = "penalties of sharded variables are sums over ranks"
        hook = hooks.wrap(getattr(tf.keras.regularizers, name), "__call__", _over_shards, why)
        stack.callback(hook.undo)
    return stack


def _over_shards(own, self, x):
    shard = shard_of(x)
    if shard is None:
        return own(self, x)
    penalty = tf.convert_to_tensor(own(self, x.local))
    for axis in shard.axes:
        penalty = summed(penalty, shard.mesh.along(axis), f"{path_of(x)}_penalty_{axis}")
    return tf.ensure_shape(penalty, [])
