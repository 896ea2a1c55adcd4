"""What SOK's two layers share: table, configuration and compute dtype."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup import padding
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.table_layer import TableLayer, freeze_tables, keras_arguments
from sok_like.runtime.checks import check_integer
from sok_like.runtime.ranks import communication_dtype
from sok_like.runtime.ranks.gradient_scale import check as check_gradient_scale
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.keras_variable import as_weight
from sok_like.table.keys import as_key_dtype, check_dtype
from sok_like.table.variable import EmbeddingVariable


class EmbeddingLayer(TableLayer):
    """A layer over one table, which has the name of the layer.

    `sok.DistributedEmbedding` tells the arguments.
    """

    # Methods of a subclass: the error for an input of another kind, and the check of a shape.
    _bad_input: Any
    _check_symbol: Any
    # The arguments that are attributes of the same name and value.
    _arguments: tuple[str, ...] = (
        *("max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num", "use_hashtable"),
        *("gradient_scale", "row_dtype", "wire_dtype", "pad_key"),
    )

    def __init__(
        self,
        *,
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        gradient_scale: str = "auto",
        row_dtype: Any = None,
        wire_dtype: Any = None,
        pad_key: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**keras_arguments(kwargs))
        self.slot_num = check_integer("slot_num", slot_num)
        self.embedding_vec_size = check_integer("embedding_vec_size", embedding_vec_size)
        most = max_vocabulary_size_per_gpu
        if most is not None:
            most = check_integer("max_vocabulary_size_per_gpu", most)
        self.max_vocabulary_size_per_gpu = most
        self.use_hashtable = bool(use_hashtable)
        self.key_dtype = as_key_dtype(tf.int64 if key_dtype is None else key_dtype, self.name)
        self.embedding_initializer = tf.keras.initializers.get(
            "random_uniform" if embedding_initializer is None else embedding_initializer
        )
        self.gradient_scale = check_gradient_scale(gradient_scale)
        self.row_dtype = communication_dtype.check(row_dtype, f"layer '{self.name}'", "row_dtype")
        self.wire_dtype = communication_dtype.check(wire_dtype, f"layer '{self.name}'")
        self.pad_key = padding.check_pad_key(pad_key, f"layer '{self.name}'")
        # XLA cannot compile the table's ops; Keras 3 checks this first.
        self.supports_jit = False
        self._weight = as_weight(
            EmbeddingVariable(
                self.embedding_vec_size,
                name=self.name,
                key_dtype=self.key_dtype,
                initializer=self.embedding_initializer,
                capacity=most,
                use_hashtable=self.use_hashtable,
                dtype=self.row_dtype,
            )
        )
        freeze_tables(self)
        self.built = True

    def build(self, input_shape=None):
        # This only tells Keras that the layer is built.
        self.built = True

    def get_config(self):
        return {
            **super().get_config(),
            **{argument: getattr(self, argument) for argument in self._arguments},
            "key_dtype": self.key_dtype.name,
            "embedding_initializer": tf.keras.initializers.serialize(self.embedding_initializer),
        }

    @classmethod
    def from_config(cls, config):
        """A layer from its configuration; a program that loads a model needs no `sok.Init`."""
        ensure_initialized()
        return super().from_config(config)

    def request(self, inputs: Any) -> tuple[HashFeature, list[int] | None]:
        """The feature to look up for an input, and the shape of its rows; None: as looked up."""
        raise NotImplementedError

    def call(self, inputs, training=None):
        feature, shape = self.request(inputs)

        def look_up(training):
            (rows,) = lookup(
                [feature],
                training=training,
                gradient_scale=self.gradient_scale,
                wire_dtype=self.wire_dtype,
                name=self.name,
            )
            return rows if shape is None else tf.reshape(rows, shape)

        return self.run(training, look_up)

    def compute_output_spec(self, inputs, training=None):
        import keras

        # Runs while a model is built, not in its first step; `call` is not traced then.
        if not isinstance(inputs, keras.KerasTensor):
            raise self._bad_input(inputs)
        check_dtype(inputs.dtype)
        self._check_symbol(inputs)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def without_padding(self, keys: tf.Tensor, row_splits: tf.Tensor | None):
        """Keys int64 `[num_keys]` without padding, and row splits; None if each row has one key."""
        if self.pad_key is None:
            return keys, row_splits
        return padding.without(self.pad_key, keys, row_splits)
