"""The modules of TensorFlow to which this package adds names."""

from __future__ import annotations

import importlib
from types import ModuleType

import tensorflow as tf


def roots() -> list[ModuleType]:
    """`tf`, and `tf.compat.v1` under each of its names.

    `import tensorflow.compat.v1` makes a second module, which replaces the one that was
    `tf.compat.v1` until then. Both share all submodules.
    """
    names = ("tensorflow._api.v2.compat.v1", "tensorflow.compat.v1")
    found = [tf, tf.compat.v1, *map(importlib.import_module, names)]
    return list({id(module): module for module in found}.values())
