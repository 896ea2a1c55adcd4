"""`sok.kit_lib.in_tensorflow2`, by which SOK 1.x's programs tell TensorFlow 1 from 2."""

import tensorflow as tf


def in_tensorflow2() -> bool:
    """Whether a program may count on TensorFlow 2; False after `tf.disable_v2_behavior()`."""
    return tf.__internal__.tf2.enabled()
