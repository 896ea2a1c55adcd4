"""`sok.OptimizerScope`: a scope in which stock optimizers train embedding variables."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.keras_version import is_keras_3, keras_optimizers
from sok_like.table.variable import is_embedding_variable

_lock = threading.Lock()
_open_scopes = 0
_hooks: list[hooks.Hook] = []


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
                classes = [tf.compat.v1.train.Optimizer, keras_optimizers().Optimizer]
                if not is_keras_3():
                    # Looks at all variables before its inner optimizer does.
                    scaling = "tf_keras.src.mixed_precision.loss_scale_optimizer"
                    classes.append(importlib.import_module(scaling).LossScaleOptimizerV3)
                    classes.append(keras_optimizers().legacy.Optimizer)
                for cls in classes:
                    why = "sok.OptimizerScope: stock optimizers train tables"
                    _hooks.append(hooks.wrap(cls, "apply_gradients", train_tables, why))
        return self

    def __exit__(self, *error: Any) -> None:
        global _open_scopes
        with _lock:
            _open_scopes -= 1
            while _open_scopes == 0 and _hooks:
                _hooks.pop().undo()


def train_tables(own: Callable, self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps a stock optimizer's `apply_gradients`, so that it accepts embedding variables, too."""
    pairs = list(grads_and_vars)
    # An aware class handles the tables by itself, and calls this with the other variables.
    if not knows_tables(self) and any(is_embedding_variable(v) for _, v in pairs):
        return OptimizerWrapper(self).apply_gradients(pairs, *args, **kwargs)
    return own(self, pairs, *args, **kwargs)
