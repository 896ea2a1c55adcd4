"""`TFDistributedEmbedding`: SOK 1.x's layer over an ordinary variable, for one replica."""

from typing import Any

import tensorflow as tf

from sok_like.lookup.table_layer import ConfiguredLayer
from sok_like.runtime.checks import check_integer, unmet
from sok_like.runtime.ranks.initialize import check_replicas


@tf.keras.utils.register_keras_serializable("sok_like")
class TFDistributedEmbedding(ConfiguredLayer):
    """`tf.nn.embedding_lookup` on an ordinary variable, of which every rank holds all rows.

    SOK 1.x split its lookups over the replicas of a `tf.distribute` strategy. Here a process is one
    replica, so the layer needs no strategy. Over ranks the variable behaves like any other dense
    one: its gradient is averaged, and it starts from rank 0's values if the program broadcasts it.

    Args:
        vocabulary_size: Rows of the table; keys must be in `[0, vocabulary_size)`.
        embedding_vec_size: Length of a row.
        initializer: Name of a Keras initializer, an initializer, or the initial rows themselves: an
            array or tensor `[vocabulary_size, embedding_vec_size]`.
        comm_options: Ignored: nothing is exchanged.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`.

    Input shape:
        Integers of any shape.

    Output shape:
        The input's shape plus a last axis `embedding_vec_size`, in the layer's compute dtype.

    Raises:
        ValueError: an argument is out of range, or the initial rows have another shape.
        RuntimeError: within a `tf.distribute` strategy of several replicas.
        tf.errors.InvalidArgumentError: a key is out of range.
    """

    _arguments = ("vocabulary_size", "embedding_vec_size", "initializer")

    def __init__(
        self,
        vocabulary_size: int,
        embedding_vec_size: int,
        initializer: Any = "GlorotNormal",
        comm_options: Any = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.supports_jit = True  # as an ordinary lookup
        check_replicas()
        self.vocabulary_size = check_integer("vocabulary_size", vocabulary_size)
        self.embedding_vec_size = check_integer("embedding_vec_size", embedding_vec_size)
        shape = (self.vocabulary_size, self.embedding_vec_size)
        rows = initializer if hasattr(initializer, "shape") else None
        if rows is not None:
            if tuple(rows.shape) != shape:
                required = f"have the shape [vocabulary_size, embedding_vec_size] = {list(shape)}"
                received = f"an array of shape {list(rows.shape)}"
                raise unmet("`initializer`", required, received, f"layer '{self.name}'")
            # The initializer of a copy of the layer, whose rows come from a file of weights.
            initializer = "GlorotNormal"
        self.initializer = tf.keras.initializers.get(initializer)

        def first_rows(shape, dtype=None, **unused):
            return self.initializer(shape, dtype) if rows is None else tf.cast(rows, dtype)

        self._embedding_weights = self.add_weight(
            name="EmbeddingWeights", shape=shape, initializer=first_rows, dtype="float32"
        )
        self.built = True

    @property
    def embedding_weights(self) -> Any:
        """The variable, `[vocabulary_size, embedding_vec_size]`."""
        return self._embedding_weights

    def call(self, inputs):
        rows = tf.nn.embedding_lookup(tf.convert_to_tensor(self._embedding_weights), inputs)
        return tf.cast(rows, self.compute_dtype or tf.float32)

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.embedding_vec_size)
