"""`init` and `filter_variables` of SOK 2.x."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.runtime.checks import require
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.keras_version import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas, ensure_initialized
from sok_like.sok2.distributed_variable import is_static
from sok_like.table.variable import is_embedding_variable

# TensorFlow's version in the form that SOK 2.x's scripts use.
tf_version = [int(part) for part in tf.__version__.split(".")[:2]]

_switched: list[hooks.Hook] = []
_COMM_TOOLS = ("horovod", "single")


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Initializes the package in this process.

    Several processes exchange by MPI, or by Horovod if the program has imported it. This call
    initialises either, unless the program has done so. A second call with the same tool has no
    effect.

    Args:
        comm_tool: "horovod", also for MPI; with one process also "single".
        use_legacy_optimizer: True puts the classes of `tf.keras.optimizers.legacy` in the place of
            those of `tf.keras.optimizers`, as SOK 2.x does: momentum, for one, has other numbers
            there. False puts Keras' own back. Keras 3 has no legacy optimizers: no effect.

    Raises:
        ValueError: `comm_tool` is another tool, or "single" in a job of several processes.
        RuntimeError: within a `tf.distribute` strategy of several replicas.
    """
    require(comm_tool in _COMM_TOOLS, "comm_tool", f"one of {_COMM_TOOLS}", comm_tool)
    check_replicas()
    ensure_initialized()
    fits = comm_tool != "single" or comm.current().world_size == 1
    require(fits, "comm_tool", "'horovod' in a job of several processes", comm_tool)
    while _switched and not use_legacy_optimizer:
        _switched.pop().undo()
    if use_legacy_optimizer and not _switched and not is_keras_3():
        optimizers = tf.keras.optimizers
        for name, cls in vars(optimizers.legacy).items():
            if isinstance(cls, type):
                why = "sok2.init: scripts of SOK 2.x train with legacy optimizers"
                _switched.append(hooks.put(optimizers, name, cls, why))


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into those of this package and the others: `(sok_vars, other_vars)`.

    Args:
        vars: Variables of both kinds, including those inside a variable of Keras 3.
    """
    variables = [(v, is_embedding_variable(v) or is_static(v)) for v in vars]
    return [v for v, is_ours in variables if is_ours], [v for v, ours in variables if not ours]
