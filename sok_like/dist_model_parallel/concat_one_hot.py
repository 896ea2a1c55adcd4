"""`ConcatOneHotEmbedding`: several features, one id each, in one table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.lookup.dense_lookup import as_row_numbers, require_in_range
from sok_like.runtime.checks import check_integer, require


@tf.keras.utils.register_keras_serializable(package="sok_like")
class ConcatOneHotEmbedding(tf.keras.layers.Layer):
    """Looks up one id per feature in one table, which holds the features' rows in order.

    Args:
        feature_sizes: Number of rows of each feature. Its ids are in `[0, size)`.
        embedding_width: Length of a row.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: Integers `[batch, num_features]`.

    Returns:
        `[batch, num_features, embedding_width]`, in the layer's compute dtype.

    Raises:
        ValueError: no feature, a size < 1, or inputs with another number of features.
        TypeError: ids are not integers.
        tf.errors.InvalidArgumentError: an id is outside its feature; the message names both.
    """

    def __init__(self, feature_sizes: Sequence[int], embedding_width: int, **kwargs: Any):
        kwargs.setdefault("autocast", False)  # would cast ids to floats
        super().__init__(**kwargs)
        self.feature_sizes = [check_integer("feature_sizes", size) for size in feature_sizes]
        require(bool(self.feature_sizes), "feature_sizes", "at least one number", feature_sizes)
        self.embedding_width = check_integer("embedding_width", embedding_width)
        self._table = Embedding(
            sum(self.feature_sizes),
            self.embedding_width,
            embeddings_initializer="glorot_uniform",
            name="params",
            dtype=kwargs.get("dtype"),
        )
        with tf.init_scope(), tf.name_scope(self.name):
            self._table.build(None)
        self.supports_jit = False

    def build(self, input_shape=None):
        """The table exists since the construction."""
        self.built = True

    def call(self, inputs):
        inputs = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        shape = inputs.shape
        if shape.rank != 2 or shape[1] not in (None, len(self.feature_sizes)):
            raise ValueError(
                f"`inputs` must be [batch, {len(self.feature_sizes)}], one id of each feature. "
                f"Received: inputs of shape {shape} (layer '{self.name}')"
            )
        starts = [0, *itertools.accumulate(self.feature_sizes[:-1])]
        ids = tf.cast(as_row_numbers(inputs), tf.int64)
        columns = tf.unstack(ids, num=len(starts), axis=1)
        rows = [
            require_in_range(column, size, f"{self.name}, feature {number}") + start
            for number, (column, size, start) in enumerate(
                zip(columns, self.feature_sizes, starts, strict=True)
            )
        ]
        return tf.cast(self._table(tf.stack(rows, axis=1)), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return (*tuple(input_shape), self.embedding_width)

    def get_config(self):
        return {
            **super().get_config(),
            "feature_sizes": self.feature_sizes,
            "embedding_width": self.embedding_width,
        }
