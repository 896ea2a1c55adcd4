"""Adam for embedding and ordinary variables, with Keras' arguments."""

from __future__ import annotations

import tensorflow as tf

from sok_like.optimizers.embedding_aware import embedding_aware


@tf.keras.utils.register_keras_serializable("sok_like")
class Adam(embedding_aware(tf.keras.optimizers.Adam)):  # type: ignore[misc]
    """`tf.keras.optimizers.Adam` that also trains embedding variables.

    The meaning is Adam's on a dense variable: the moments of every row decay at every step, whether
    the row is in the batch or not. The cost is that of the rows in the batch: a row catches up when
    it is next read or updated. Gradients of equal keys are summed. Arguments are those of
    `tf.keras.optimizers.Adam` (learning_rate 0.001, beta_1 0.9, beta_2 0.999, epsilon 1e-7).

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """


@tf.keras.utils.register_keras_serializable("sok_like")
class EmbeddingAdam(Adam):
    """Adam for embedding variables alone; ValueError for any other.

    For programs that split a model's variables and give each kind an optimizer of its own.

    Args:
        learning_rate, beta_1, beta_2, epsilon: As Keras' Adam.
        name: Name of the optimizer.
    """

    _sok_only_embeddings = True

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        name="Plugin_Adam",
        **kwargs,
    ):
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            name=name,
            **kwargs,
        )
