"""Which Keras `tf.keras` is."""

import functools

import tensorflow as tf


@functools.cache
def is_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3; False under `TF_USE_LEGACY_KERAS=1`, where it is tf_keras."""
    return not hasattr(tf.keras, "__internal__")
