"""Ranks that must get the same batch tell each other digests of theirs, and raise if they differ.

    step's data --digests--.
                            >-- one exchange --> equal on all ranks, or all of them raise
    model's inputs --digests-'

Programs written for Horovod give each rank data of its own. Under a distribution that trains on
outputs and labels that do not belong together, or lets the replicated weights of ranks drift apart,
without anything else to notice it by.

Integers, texts and such are compared exactly, by a hash. Floats may come out of another model,
computed on another processor, and are compared by one projection each, within a tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from sok_like.runtime import comm, turns

# Of the norm: far above what processors round differently, far below what two batches differ by.
_TOLERANCE = 1e-3
_step = threading.local()


def in_step(own_step: Callable, distribution: Any) -> Callable:
    """Wraps `train_step` or `test_step`: labels and sample weights are compared, too."""

    @functools.wraps(own_step)
    def step(data, *args, **kwargs):
        _step.data = list(zip(("x", "y", "sample_weight"), _unpacked(data), strict=True))
        try:
            result = own_step(data, *args, **kwargs)
            if _step.data is not None:  # the step has called no model of a distribution
                with compared([], distribution):
                    pass
            return result
        finally:
            _step.data = None

    return step


def _unpacked(data):
    if isinstance(data, tuple) and len(data) <= 3:
        return (*data, None, None)[:3]
    return data, None, None


@contextlib.contextmanager
def compared(inputs: Any, distribution: Any) -> Iterator[None]:
    """A scope whose ops run once all ranks have the same `inputs`, and data of the step around.

    Ranks that differ in their index along the batch axis need not, without `auto_shard_dataset`.

    Args:
        inputs: Any structure of tensors and arrays; everything else in it is not compared.

    Raises:
        tf.errors.InvalidArgumentError: the batches of some ranks differ; on all ranks.
    """
    everything = [("inputs", inputs), *(getattr(_step, "data", None) or [])]
    _step.data = None
    names: list[str] = []
    digests: list[tf.Tensor] = []
    for name, structure in everything:
        tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if _is_data(t)]
        names += [name if len(tensors) == 1 else f"{name}[{i}]" for i in range(len(tensors))]
        digests += map(tf.convert_to_tensor, tensors)
    floats = tf.constant([t.dtype.is_floating for t in digests])
    group = 0 if distribution.auto_shard_dataset else distribution.data_shard_id
    values = tf.concat([[tf.constant(group, tf.int64)], *map(_digest, digests)], 0)
    told, lengths = turns.exchange_notes(values, [], comm.current(), "distribution_batch")
    same_length = tf.debugging.Assert(
        tf.reduce_all(lengths == lengths[0]),
        ["Every rank must get the same batches. Received: tensors of other numbers per rank"],
    )
    with tf.control_dependencies([] if same_length is None else [same_length]):
        told = tf.reshape(told, [comm.current().world_size, -1])
    same = _assert_same(told, floats, names)
    with tf.control_dependencies([] if same is None else [same]):
        yield


def _is_data(value):
    if not tf.is_tensor(value) and not hasattr(value, "__array__"):
        return False
    return getattr(value, "dtype", None) not in (tf.resource, tf.variant)


def _digest(tensor):
    """int64 `[2]`: a hash, or the bits of a float's projection and norm."""
    if not tensor.dtype.is_floating:
        if tensor.dtype.is_complex:
            tensor = tf.bitcast(tensor, tf.float64)
        words = tf.raw_ops.Fingerprint(data=tf.reshape(tensor, [1, -1]), method="farmhash64")
        return tf.concat([tf.bitcast(words, tf.int64), [0]], 0)
    if tensor.dtype != tf.float64:
        tensor = tf.cast(tensor, tf.float32)
    rows = tf.reshape(tensor, [1 if tensor.shape.rank == 0 else tf.shape(tensor)[0], -1])
    projected = tf.linalg.matvec(rows, _weights(rows, 1))
    sums = [tf.reduce_sum(projected * _weights(rows, 0)), tf.sqrt(2 * tf.nn.l2_loss(rows))]
    return tf.bitcast(tf.cast(tf.stack(sums), tf.float64), tf.int64)


def _weights(rows, axis):
    """Numbers of a size around one, of which no two are alike."""
    return 1.5 + tf.sin(tf.cast(tf.range(tf.shape(rows)[axis]), rows.dtype))


def _assert_same(told, floats, names):
    """An op, or None eagerly, that fails where the digests of ranks of one group differ."""
    group, digests = told[:, 0], tf.reshape(told[:, 1:], [told.shape[0], len(names), 2])
    of_group = tf.cast(group[:, None] == group[None, :], tf.int32)
    expected = tf.gather(digests, tf.argmax(of_group, 1))  # of the first rank of the group
    mine, other = tf.bitcast(digests, tf.float64), tf.bitcast(expected, tf.float64)
    near = tf.abs(mine - other)[..., 0] <= _TOLERANCE * tf.maximum(mine, other)[..., 1]
    no_number = ~tf.math.is_finite(mine[..., 0]) & ~tf.math.is_finite(other[..., 0])
    equal = tf.reduce_all(digests == expected, 2) | (floats & (near | no_number))
    wrong = tf.where(~equal)  # pairs of rank and tensor
    first = tf.concat([wrong, [[0, 0]]], 0)[0]
    text = [
        "Every rank must get the same batches: a distribution splits them itself. Received: on "
        "rank ",
        tf.strings.as_string(first[0]),
        " other values than on rank ",
        tf.strings.as_string(tf.argmax(of_group, 1)[first[0]]),
        " in ",
        tf.gather(tf.constant([*names, ""]), first[1]),
        ". Without `shard`, and with one seed of `shuffle`, ranks read the same",
    ]
    return tf.debugging.Assert(tf.reduce_all(equal), [tf.strings.join(text)])
