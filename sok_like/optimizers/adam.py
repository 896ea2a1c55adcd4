"""`sok.optimizers.Adam`, for embedding variables only."""

import tensorflow as tf

from sok_like.optimizers import own


@tf.keras.utils.register_keras_serializable("sok_like", name="EmbeddingAdam")
class Adam(own.Adam):
    """Adam for embedding variables only; raises ValueError for any other variable.

    For programs that split a model's variables and use one optimizer for each kind.

    Args:
        learning_rate, beta_1, beta_2, epsilon: As in Keras' Adam.
        name: Name of the optimizer.

    Raises:
        ValueError: a setting that tables cannot follow, such as `clipnorm`; in `apply_gradients`,
            another variable.
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
        super().__init__(learning_rate, beta_1, beta_2, epsilon, name=name, **kwargs)
