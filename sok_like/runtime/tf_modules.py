"""TensorFlow's modules to which names are added."""

from __future__ import annotations

import importlib
from types import ModuleType

import tensorflow as tf


def roots() -> list[ModuleType]:
    """`tf`, and `tf.compat.v1` under each of its names.

    `import tensorflow.compat.v1` makes a module of its own beside the one that `tf.compat.v1` was
    until then, and puts it in that place. They share all modules below.
    """
    names = ("tensorflow._api.v2.compat.v1", "tensorflow.compat.v1")
    found = [tf, tf.compat.v1, *map(importlib.import_module, names)]
    return list({id(module): module for module in found}.values())
