"""`sok.kit_lib.in_tensorflow2`, with which SOK 1.x's programs distinguish TensorFlow 1 and 2."""

import tensorflow as tf

__all__ = ["in_tensorflow2"]


def in_tensorflow2() -> bool:
    """Whether TensorFlow 2's behavior is on; False after `tf.disable_v2_behavior()`."""
    return tf.__internal__.tf2.enabled()


def __dir__() -> list[str]:
    return __all__
