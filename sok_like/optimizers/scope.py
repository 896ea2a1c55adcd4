"""`sok.OptimizerScope`: a scope in which stock optimizers train embedding variables."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.keras_version import is_keras_3
from sok_like.table.variable import is_embedding_variable

_lock = threading.Lock()
_open_scopes = 0
# (Class, its own method or None): the last scope restores these.
_replaced: list[tuple[type, Any]] = []


class OptimizerScope:
    """A scope in which a stock optimizer's `apply_gradients` accepts embedding variables.

    With embedding variables it does what that of `sok.OptimizerWrapper(optimizer)` does; without,
    it is unchanged. Outside the scope a stock optimizer raises and names the wrapper.

        with sok.OptimizerScope(embedding_variables):
            optimizer.apply_gradients(zip(gradients, embedding_variables))

    Args:
        trainable_variables: List or tuple of variables, as in SOK 1.x. Its content does not matter:
            the scope applies to every embedding variable.

    Raises:
        RuntimeError: `trainable_variables` is neither a list nor a tuple.
    """

    def __init__(self, trainable_variables: Sequence[Any]):
        if not isinstance(trainable_variables, (list, tuple)):
            required, given = "a list or a tuple of variables", trainable_variables
            raise wrong_argument("trainable_variables", required, given, error=RuntimeError)

    def __enter__(self) -> OptimizerScope:
        global _open_scopes
        with _lock:
            _open_scopes += 1
            if _open_scopes == 1:
                for cls in _stock_classes():
                    _replaced.append((cls, cls.__dict__.get("apply_gradients")))
                    cls.apply_gradients = train_tables(cls.apply_gradients)
        return self

    def __exit__(self, *error: Any) -> None:
        global _open_scopes
        with _lock:
            _open_scopes -= 1
            while _open_scopes == 0 and _replaced:
                cls, before = _replaced.pop()
                if before is None:  # the class had inherited it
                    del cls.apply_gradients  # type: ignore[attr-defined]
                else:
                    cls.apply_gradients = before  # type: ignore[attr-defined]


def train_tables(stock: Callable) -> Callable:
    """A stock optimizer's `apply_gradients` that accepts embedding variables, too."""

    @functools.wraps(stock)
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        # An aware class handles the tables by itself, and calls this with the other variables.
        if not knows_tables(self) and any(is_embedding_variable(v) for _, v in pairs):
            return OptimizerWrapper(self).apply_gradients(pairs, *args, **kwargs)
        return stock(self, pairs, *args, **kwargs)

    return apply_gradients


def _stock_classes():
    classes = [tf.compat.v1.train.Optimizer, tf.keras.optimizers.Optimizer]
    if is_keras_3():
        return classes
    from tf_keras.src.mixed_precision.loss_scale_optimizer import LossScaleOptimizerV3

    # The last one looks at all variables before its inner optimizer does.
    return [*classes, tf.keras.optimizers.legacy.Optimizer, LossScaleOptimizerV3]
