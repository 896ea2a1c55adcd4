"""Which Keras `tf.keras` is, and to which family an optimizer belongs."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import tensorflow as tf


@functools.cache
def is_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3; False under `TF_USE_LEGACY_KERAS=1`, where it is tf_keras."""
    return not hasattr(tf.keras, "__internal__")


def keras_optimizers() -> Any:
    """The running Keras' module of optimizers; `sok2.init` changes `tf.keras.optimizers`."""
    return importlib.import_module("keras.optimizers" if is_keras_3() else "tf_keras.optimizers")


def optimizer_family(cls: type) -> str | None:
    """ "tf.compat.v1", "keras", "tf_keras", "legacy" (of tf_keras), or None: none of these."""
    if issubclass(cls, tf.compat.v1.train.Optimizer):
        return "tf.compat.v1"
    for base in cls.__mro__:
        if base.__module__.startswith("keras.src.optimizers"):
            return "keras"
        if base.__module__ == "tf_keras.src.optimizers.optimizer":
            return "tf_keras"
        if base.__module__ == "tf_keras.src.optimizers.legacy.optimizer_v2":
            return "legacy"
    return None
