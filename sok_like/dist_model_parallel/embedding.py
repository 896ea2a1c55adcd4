"""`sok.Embedding`: Keras' Embedding and `tf.nn.embedding_lookup_sparse` as one layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup.dense_lookup import (
    DENSE_COMBINERS,
    as_tf_table,
    lookup_rows,
    symbolic_output,
)
from sok_like.lookup.padding import mask_of
from sok_like.runtime.checks import check_combiner, check_integer, require
from sok_like.runtime.framework.keras_version import is_keras_3


@tf.keras.utils.register_keras_serializable(package="sok_like")
class Embedding(tf.keras.layers.Layer):
    """Looks up ids in a dense table, and combines the rows of a sample if it has a combiner.

    Args:
        input_dim: Number of rows. Ids are in `[0, input_dim)`.
        output_dim: Length of a row.
        embeddings_initializer: Initializer of the table. It runs on the CPU, so that a table that
            fills a device needs no second copy there.
        embeddings_regularizer: Regularizer of the table.
        activity_regularizer: Regularizer of the output.
        embeddings_constraint: Constraint of the table.
        combiner: "sum", "mean", or None: how the rows of the last axis are reduced.
        use_custom_kernel: For compatibility with DMP, without effect.
        mask_zero: True: id 0 is padding, so the output has a Keras mask, False for id 0. As in
            Keras' layer, id 0 has a row. Needs `combiner=None`.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`, and `weights`, a list of one array
            `[input_dim, output_dim]` to start from.

    Call arguments:
        inputs: Integers of any dtype. A `tf.Tensor` `[..., hotness]` (with a combiner, at least two
            axes); a `tf.RaggedTensor` `[batch, None]`; or a `tf.SparseTensor`
            `[batch, max_hotness]` in any order.
        weights: Floats of the kind and shape of `inputs`, or None: the weight of each row; a mean
            is divided by the sum of weights. Needs a combiner.

    Output shape:
        With a combiner `[..., output_dim]`, for ragged and sparse ids `[batch, output_dim]`;
        samples without ids give zeros. Without one `[..., hotness, output_dim]`, for ragged and
        sparse ids a ragged `[batch, None, output_dim]`. In the layer's compute dtype.

    Example:

        >>> layer = Embedding(1000, 64, combiner="mean")
        >>> layer(tf.random.uniform((16, 7), maxval=1000, dtype=tf.int32)).shape
        TensorShape([16, 64])

    Raises:
        ValueError: a dimension < 1, an unknown combiner, 1-D ids with a combiner, nested ragged
            ids, unfit weights.
        TypeError: ids are not integers, or weights are not floats.
        tf.errors.InvalidArgumentError: an id is outside the table; names the id and the table.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        activity_regularizer: Any = None,
        embeddings_constraint: Any = None,
        combiner: str | None = None,
        use_custom_kernel: bool = True,
        mask_zero: bool = False,
        **kwargs: Any,
    ):
        # Keras must not cast ids to floats, nor a whole table.
        kwargs.setdefault("autocast", False)
        weights = kwargs.pop("weights", None)
        regularizer = tf.keras.regularizers.get
        super().__init__(activity_regularizer=regularizer(activity_regularizer), **kwargs)
        self.input_dim = check_integer("input_dim", input_dim)
        self.output_dim = check_integer("output_dim", output_dim)
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizer(embeddings_regularizer)
        self.embeddings_constraint = tf.keras.constraints.get(embeddings_constraint)
        self.combiner = check_combiner(combiner, DENSE_COMBINERS)
        self.use_custom_kernel = bool(use_custom_kernel)
        required = "False with a combiner, whose output has no positions to mask"
        of = f"layer '{self.name}'"
        require(not mask_zero or combiner is None, "mask_zero", required, mask_zero, of)
        self.mask_zero = self.supports_masking = bool(mask_zero)
        # XLA cannot compile shapes that depend on values, such as the number of unique ids.
        self.supports_jit = False
        if weights is not None:
            self.set_weights(weights)

    def build(self, input_shape=None):
        def initial_rows(shape, dtype=None, **kwargs):
            with tf.device("CPU:0"):
                return self.embeddings_initializer(shape, dtype=dtype)

        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.input_dim, self.output_dim),
            dtype=self.variable_dtype,
            initializer=initial_rows,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            trainable=True,
            **{"autocast" if is_keras_3() else "experimental_autocast": False},
        )
        self.built = True

    def set_weights(self, weights: Any) -> None:
        """Sets the table from a list of one array, even if the layer has not been called yet."""
        if not self.built:
            with tf.init_scope(), tf.name_scope(self.name):
                self.build(None)
        super().set_weights(weights)

    def call(self, inputs, weights=None):
        if not tf.is_tensor(inputs):
            inputs = tf.convert_to_tensor(inputs)
        if weights is not None and not tf.is_tensor(weights):
            weights = tf.convert_to_tensor(weights)
        table = as_tf_table(self.embeddings)
        rows = lookup_rows(table, inputs, self.combiner, weights, self.name)
        return tf.cast(rows, self.compute_dtype)

    def compute_mask(self, inputs, mask=None):
        return mask_of(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape):
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.output_dim)

    def compute_output_spec(self, inputs, weights=None):
        return symbolic_output(self, inputs)

    def get_config(self):
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": tf.keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": tf.keras.regularizers.serialize(self.embeddings_regularizer),
            "activity_regularizer": tf.keras.regularizers.serialize(self.activity_regularizer),
            "embeddings_constraint": tf.keras.constraints.serialize(self.embeddings_constraint),
            "combiner": self.combiner,
            "use_custom_kernel": self.use_custom_kernel,
            "mask_zero": self.mask_zero,
        }

    @classmethod
    def from_config(cls, config):
        """A layer from its configuration, or from that of Keras' Embedding.

        `input_length`, which only Keras' layer has, is ignored. Settings of other Keras versions
        are ignored if they are None.
        """
        dropped = {"input_length"} | ({"batch_input_shape"} if is_keras_3() else set())
        unset = {key for key in ("quantization_config",) if config.get(key) is None}
        return super().from_config({k: v for k, v in config.items() if k not in dropped | unset})
