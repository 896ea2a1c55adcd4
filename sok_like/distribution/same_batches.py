"""Compares digests of batches over ranks that must get the same batch, and raises if they differ.

    step's data --digests--.
                            >-- one exchange --> equal on all ranks, or all of them raise
    model's inputs --digests-'

Programs written for Horovod give each rank data of its own. Under a distribution this would train
on outputs and labels that do not belong together, or let the ranks' replicated weights drift apart,
and nothing else would detect it.

Integers, texts and similar data are compared exactly, by a hash. Floats may come from another
model, computed on another processor. They are compared by a sum and a norm, within a tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from sok_like.runtime import comm, native, turns

# Relative to the norm: far above rounding differences of processors, far below those of batches.
_TOLERANCE = 1e-3
_step = threading.local()


def in_step(own_step: Callable, distribution: Any) -> Callable:
    """Wraps `train_step` or `test_step`, so that labels and sample weights are compared, too."""

    @functools.wraps(own_step)
    def step(data, *args, **kwargs):
        _step.data = list(zip(("x", "y", "sample_weight"), _unpacked(data), strict=True))
        try:
            result = own_step(data, *args, **kwargs)
            if _step.data is not None:  # the step has called no model under a distribution
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
    """A scope whose ops run only if all ranks have the same `inputs` and data of the step.

    Without `auto_shard_dataset`, data may differ between indices along the batch axis.

    Args:
        inputs: Any structure of tensors and arrays; anything else in it is not compared.

    Raises:
        tf.errors.InvalidArgumentError: the batches of some ranks differ; on all ranks.
    """
    everything = [("inputs", inputs), *(getattr(_step, "data", None) or [])]
    _step.data = None
    names: list[str] = []
    digested: list[tf.Tensor] = []
    for name, structure in everything:
        tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if _is_data(t)]
        names += [name if len(tensors) == 1 else f"{name}[{i}]" for i in range(len(tensors))]
        digested += map(tf.convert_to_tensor, tensors)
    ops = native.ops()
    shard = 0 if distribution.auto_shard_dataset else distribution.data_shard_id
    with tf.device("CPU:0"):  # the ops' device
        values = ops.sok_digest_batch(tensors=digested, shard=shard)
        told, lengths = turns.exchange_notes(values, [], comm.current(), "distribution_batch")
        same = ops.sok_compare_batches(
            digests=told,
            lengths=lengths,
            names=names,
            floats=[t.dtype.is_floating for t in digested],
            tolerance=_TOLERANCE,
        )
    with tf.control_dependencies([] if same is None else [same]):
        yield


def _is_data(value):
    if not tf.is_tensor(value) and not hasattr(value, "__array__"):
        return False
    return getattr(value, "dtype", None) not in (tf.resource, tf.variant)
