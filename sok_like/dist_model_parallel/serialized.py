"""The optimizers of `DistributedOptimizer` in configurations: clones and files make them again.

There is a class for each class of optimizer, so one name stands for all of them in files. A
configuration is that of the optimizer within, and says which class that is.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

PACKAGE, NAME = "sok_like.dist_model_parallel", "DistributedOptimizer"


def registered(cls: type) -> type:
    """The class, which Keras' files call by the one name."""
    return tf.keras.utils.register_keras_serializable(PACKAGE, NAME)(cls)


@registered
class Serialized:
    """Mixin: an optimizer's configuration. A subclass has the class within as `_dmp_class`."""

    _dmp_class: Any
    _dmp_sparse_as_dense: bool

    def get_config(self):
        """The configuration of the optimizer within, its class, and the own argument."""
        described = tf.keras.utils.serialize_keras_object(within(self))
        return {
            **described.pop("config"),
            "dmp_class": described,
            "dmp_sparse_as_dense": self._dmp_sparse_as_dense,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """An optimizer from its own configuration."""
        config = dict(config)
        sparse_as_dense = config.pop("dmp_sparse_as_dense")
        described = {**config.pop("dmp_class"), "config": config}
        optimizer = tf.keras.utils.deserialize_keras_object(described, custom_objects)
        # It makes the classes that this module describes.
        gradients: Any = importlib.import_module("sok_like.dist_model_parallel.gradients")
        return gradients.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)


def within(optimizer: Any) -> Any:
    """A view of an optimizer of `DistributedOptimizer` that is of the class within."""
    view = object.__new__(optimizer._dmp_class)
    # Not by the optimizer's __setattr__, which would track the dictionary as state to save.
    object.__setattr__(view, "__dict__", optimizer.__dict__)
    return view
