"""Saves optimizers of `DistributedOptimizer` in configurations, from which clones and files load.

There is one class per class of optimizer, and in files one name stands for all of them. A
configuration is that of the inner optimizer, plus the name of its class.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from sok_like.runtime.attributes import view

PACKAGE, NAME = "sok_like.dist_model_parallel", "DistributedOptimizer"


def registered(cls: type) -> type:
    """Registers a class under the one name that Keras' files use."""
    return tf.keras.utils.register_keras_serializable(PACKAGE, NAME)(cls)


@registered
class Serialized:
    """Mixin: an optimizer's configuration. A subclass sets the inner class as `_dmp_class`."""

    _dmp_class: Any
    _dmp_sparse_as_dense: bool

    def get_config(self):
        """The configuration of the inner optimizer, its class, and this class's own argument."""
        described = tf.keras.utils.serialize_keras_object(within(self))
        return {
            **described.pop("config"),
            "dmp_class": described,
            "dmp_sparse_as_dense": self._dmp_sparse_as_dense,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        sparse_as_dense = config.pop("dmp_sparse_as_dense")
        described = {**config.pop("dmp_class"), "config": config}
        optimizer = tf.keras.utils.deserialize_keras_object(described, custom_objects)
        # That module makes the classes described here.
        gradients: Any = importlib.import_module("sok_like.dist_model_parallel.gradients")
        return gradients.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)


def within(optimizer: Any) -> Any:
    """A view of an optimizer of `DistributedOptimizer` whose class is the inner one."""
    return view(optimizer._dmp_class, optimizer)
