"""Adam for embedding and ordinary variables, with Keras' arguments."""

from __future__ import annotations

import tensorflow as tf

from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.runtime.framework.keras_version import keras_optimizers


@tf.keras.utils.register_keras_serializable("sok_like")
class Adam(embedding_aware(keras_optimizers().Adam)):  # type: ignore[misc]
    """`tf.keras.optimizers.Adam` that also trains embedding variables.

    The result is that of Adam on a dense variable: the moments of every row decay at every step,
    whether the row is in the batch or not. The cost is only that of the rows in the batch: a row
    catches up when it is next read or updated. Gradients of equal keys are summed. Arguments are
    those of `tf.keras.optimizers.Adam` (learning_rate 0.001, beta_1 0.9, beta_2 0.999, epsilon
    1e-7).

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """
