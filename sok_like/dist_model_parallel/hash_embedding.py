"""`sok.HashEmbedding`: `sok.Embedding` without a vocabulary."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup.dense_lookup import check_ids, symbolic_output
from sok_like.lookup.flat_ids import FlatIds
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.local_marks import mark_local
from sok_like.lookup.padding import check_pad_key, mask_of
from sok_like.lookup.table_layer import TableLayer, freeze_tables, keras_arguments
from sok_like.runtime.checks import OPTIONAL_COMBINERS, check_combiner, check_integer
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.keras_variable import as_weight
from sok_like.table.keys import as_key_dtype
from sok_like.table.variable import EmbeddingVariable


@tf.keras.utils.register_keras_serializable(package="sok_like")
class HashEmbedding(TableLayer):
    """Looks up keys in a hash table, and combines the rows of a sample if it has a combiner.

    Keys are any 64-bit integers, and the table grows with them. On several ranks key k is on rank
    `uint64(k) % world_size`. Use it as a layer, or in the list of `dmp.DistributedEmbedding`.
    Without `sok.Init` it initialises the package itself.

    Args:
        output_dim: Length of a row.
        combiner: "sum", "mean", "sqrtn", or None: how the rows of the last axis are reduced.
        embeddings_initializer: Keras initializer or its name; a row is a function of (seed, name,
            key, column), see docs/semantics/keys_and_rows.md.
        capacity: Maximum number of keys per rank; None: no limit.
        initial_capacity: Number of keys for which each rank allocates memory at first.
        key_dtype: int64, int32, uint64 or uint32: dtype of the keys in weights.
        pad_key: Keys of this value are padding: they are neither inserted nor trained, and not in
            the sum or mean. Without a combiner their rows are zeros, and the output has a Keras
            mask, False for padding. None: no padding and no mask.
        **kwargs: Keras' own: `name`, also the table's, which must be the same on all ranks,
            `dtype`, `trainable`.

    Call arguments:
        inputs: Integers, as in `sok.Embedding`; every value but `pad_key` is a key.
        training: True inserts missing keys. False reads their initial rows and inserts no keys.

    Output shape:
        As in `sok.Embedding`, in the layer's compute dtype.

    The owner of a row gets its gradient, summed over ranks and divided by their number. This is
    the scale that `dmp.DistributedGradientTape` gives to every other table. Train it with
    `sok.OptimizerWrapper`, or a `dmp.DistributedOptimizer` around one.

    Raises:
        ValueError: an argument is out of range, 1-D ids with a combiner, nested ragged ids.
        TypeError: ids are not integers.
        tf.errors.ResourceExhaustedError: on one rank, more keys than `capacity`; on several ranks
            an InvalidArgumentError on all of them.
    """

    def __init__(
        self,
        output_dim: int,
        combiner: str | None = None,
        embeddings_initializer: Any = "uniform",
        capacity: int | None = None,
        initial_capacity: int = 0,
        key_dtype: Any = tf.int64,
        pad_key: int | None = None,
        **kwargs: Any,
    ):
        # Inputs are keys; Keras must not cast them to floats.
        kwargs.setdefault("autocast", False)
        super().__init__(**keras_arguments(kwargs))
        self.output_dim = check_integer("output_dim", output_dim)
        self.combiner = check_combiner(combiner, OPTIONAL_COMBINERS)
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self.capacity = None if capacity is None else check_integer("capacity", capacity)
        self.initial_capacity = check_integer("initial_capacity", initial_capacity, 0)
        self.key_dtype = as_key_dtype(key_dtype, self.name)
        self.pad_key = check_pad_key(pad_key, f"layer '{self.name}'")
        self.supports_masking = self.pad_key is not None and combiner is None
        # XLA cannot compile the table's ops; Keras 3 checks this first.
        self.supports_jit = False

    def build(self, input_shape=None):
        """Makes the table, which does not depend on inputs."""
        if self.built:
            return
        with tf.init_scope():
            ensure_initialized()
            table = EmbeddingVariable(
                self.output_dim,
                name=self.name,
                key_dtype=self.key_dtype,
                initializer=self.embeddings_initializer,
                capacity=self.capacity,
                initial_capacity=self.initial_capacity,
            )
            self._weight = as_weight(table)
            freeze_tables(self)
        if comm.current().world_size > 1:
            mark_local(self._weight)
        self.built = True

    def call(self, inputs, training=None):
        if not tf.is_tensor(inputs):
            inputs = tf.convert_to_tensor(inputs)
        check_ids(inputs, self.combiner, self.name)
        flat = FlatIds(inputs, self.combiner, hashed=True, pad_key=self.pad_key)
        feature = HashFeature(self.table, flat.ids, flat.combiner, flat.row_splits)

        def rows(training):
            (found,) = lookup([feature], training=training, gradient_scale="mean", name=self.name)
            return flat.restore(found)

        return self.run(training, rows)

    def compute_mask(self, inputs, mask=None):
        return mask_of(inputs, self.pad_key) if self.supports_masking else None

    def compute_output_shape(self, input_shape):
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.output_dim)

    def compute_output_spec(self, inputs, training=None):
        return symbolic_output(self, inputs)

    def get_config(self):
        return {
            **super().get_config(),
            "hash_table": True,  # for the planner
            "output_dim": self.output_dim,
            "combiner": self.combiner,
            "embeddings_initializer": tf.keras.initializers.serialize(self.embeddings_initializer),
            "capacity": self.capacity,
            "initial_capacity": self.initial_capacity,
            "key_dtype": self.key_dtype.name,
            "pad_key": self.pad_key,
        }

    @classmethod
    def from_config(cls, config):
        return super().from_config({k: v for k, v in config.items() if k != "hash_table"})
