"""L1 and L2 penalties of sharded variables: each rank's part of the sum, summed over ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from sok_like.distribution.collectives import summed
from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.runtime.attributes import attributes


def hooks() -> contextlib.ExitStack:
    """A scope in which these penalties do not gather sharded variables.

    Other penalties need whole values, and gather them.
    """
    stack = contextlib.ExitStack()
    kinds = tf.keras.regularizers
    for cls in (kinds.L1, kinds.L2, kinds.L1L2):
        stack.enter_context(attributes(cls, {"__call__": _over_shards(cls.__call__)}))
    return stack


def _over_shards(own):
    @functools.wraps(own)
    def call(self: Any, x: Any) -> Any:
        shard = shard_of(x)
        if shard is None:
            return own(self, x)
        penalty = tf.convert_to_tensor(own(self, x.local))
        for axis in shard.axes:
            penalty = summed(penalty, shard.mesh.along(axis), f"{path_of(x)}_penalty_{axis}")
        return tf.ensure_shape(penalty, [])

    return call
