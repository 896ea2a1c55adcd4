"""Layers over one table that `dmp.DistributedEmbedding` can shard, and one that joins features.

sok.Embedding                Keras' Embedding and `tf.nn.embedding_lookup_sparse` as one layer
sok.HashEmbedding            the same without a vocabulary
dmp.ConcatOneHotEmbedding    several features, one id each, in one `sok.Embedding`
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import dense_lookup
from sok_like.lookup.hash_lookup import HashFeature
from sok_like.lookup.ids import FlatIds, as_row_numbers, check_pad_key, mask_of
from sok_like.lookup.local_variables import mark_local
from sok_like.lookup.table_layer import ConfiguredLayer, TableLayer
from sok_like.runtime.checks import OPTIONAL_COMBINERS, check_combiner, check_integer, require
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.keys import as_key_dtype


class _ByCombiner:
    """What Keras asks of a layer with `output_dim`, `combiner` and `_masked_id` (None: no mask)."""

    def compute_mask(self, inputs, mask=None):
        return mask_of(inputs, self._masked_id)

    def compute_output_shape(self, input_shape):
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.output_dim)

    def compute_output_spec(self, inputs, *args, **kwargs):
        shape = self.compute_output_shape(inputs.shape)
        return output_symbol(inputs, self.combiner, shape, self.compute_dtype, self.name)


def output_symbol(ids: Any, combiner: str | None, shape: Any, dtype: str, table_name: str) -> Any:
    """Keras 3's symbol for the rows of symbolic ids, which must be such as can be looked up."""
    dense_lookup.check_ids(tf.TensorSpec(ids.shape, tf.as_dtype(ids.dtype)), combiner, table_name)
    ragged = bool(getattr(ids, "ragged", False)) and combiner is None
    return tf.keras.KerasTensor(shape, dtype=dtype, ragged=ragged)


@tf.keras.utils.register_keras_serializable(package="sok_like")
class Embedding(_ByCombiner, ConfiguredLayer):
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

    _arguments = (
        *("input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer"),
        *("activity_regularizer", "embeddings_constraint", "combiner", "use_custom_kernel"),
        "mask_zero",
    )

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
        self.combiner = check_combiner(combiner, dense_lookup.DENSE_COMBINERS)
        self.use_custom_kernel = bool(use_custom_kernel)
        required = "False with a combiner, whose output has no positions to mask"
        of = f"layer '{self.name}'"
        require(not mask_zero or combiner is None, "mask_zero", required, mask_zero, of)
        self.mask_zero = self.supports_masking = bool(mask_zero)
        self._masked_id = 0 if mask_zero else None
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
        inputs = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        if weights is not None and not tf.is_tensor(weights):
            weights = tf.convert_to_tensor(weights)
        table = dense_lookup.as_tf_table(self.embeddings)
        rows = dense_lookup.lookup_rows(table, inputs, self.combiner, weights, self.name)
        return tf.cast(rows, self.compute_dtype)

    @classmethod
    def from_config(cls, config):
        """Also from the configuration of Keras' Embedding, without settings of other Kerases."""
        dropped = {"input_length"} | ({"batch_input_shape"} if is_keras_3() else set())
        unset = {key for key in ("quantization_config",) if config.get(key) is None}
        return super().from_config({k: v for k, v in config.items() if k not in dropped | unset})


@tf.keras.utils.register_keras_serializable(package="sok_like")
class HashEmbedding(_ByCombiner, TableLayer):
    """Looks up keys in a hash table, and combines the rows of a sample if it has a combiner.

    Keys are any 64-bit integers, and the table grows with them. On several ranks key k is on rank
    `uint64(k) % world_size`. Use it as a layer, or in the list of `dmp.DistributedEmbedding`.
    Without `sok.Init` it initialises the package itself.

    Args:
        output_dim: Length of a row.
        combiner: "sum", "mean", "sqrtn", or None: how the rows of the last axis are reduced.
        embeddings_initializer: The `initializer` of `sok.EmbeddingVariable`.
        capacity, initial_capacity, key_dtype: As in `sok.EmbeddingVariable`.
        pad_key: As in `sok.GroupEmbedding`, an integer.
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

    hash_table = True  # for the planner
    gradient_scale, wire_dtype = "mean", None
    _arguments = (
        *("hash_table", "output_dim", "combiner", "embeddings_initializer", "capacity"),
        *("initial_capacity", "key_dtype", "pad_key"),
    )

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
        super().__init__(**kwargs)
        self.output_dim = check_integer("output_dim", output_dim)
        self.combiner = check_combiner(combiner, OPTIONAL_COMBINERS)
        self.embeddings_initializer = tf.keras.initializers.get(embeddings_initializer)
        self.capacity = None if capacity is None else check_integer("capacity", capacity)
        self.initial_capacity = check_integer("initial_capacity", initial_capacity, 0)
        self.key_dtype = as_key_dtype(key_dtype, self.name)
        self.pad_key = check_pad_key(pad_key, f"layer '{self.name}'")
        self._masked_id = self.pad_key if combiner is None else None
        self.supports_masking = self._masked_id is not None

    def build(self, input_shape=None):
        """Makes the table, which does not depend on inputs."""
        if self.built:
            return
        with tf.init_scope():
            ensure_initialized()
            self._make_table(
                self.output_dim,
                key_dtype=self.key_dtype,
                initializer=self.embeddings_initializer,
                capacity=self.capacity,
                initial_capacity=self.initial_capacity,
            )
        if comm.current().world_size > 1:
            mark_local(self._weight)
        self.built = True

    def call(self, inputs, training=None):
        inputs = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        dense_lookup.check_ids(inputs, self.combiner, self.name)
        flat = FlatIds(inputs, self.combiner, hashed=True, pad_key=self.pad_key)
        feature = HashFeature(self.table, flat.ids, flat.combiner, flat.row_splits)
        (rows,) = self.look_up(training, [feature])
        return self.as_output(flat.restore(rows))

    @classmethod
    def from_config(cls, config):
        return super().from_config({k: v for k, v in config.items() if k != "hash_table"})


@tf.keras.utils.register_keras_serializable(package="sok_like")
class ConcatOneHotEmbedding(ConfiguredLayer):
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

    _arguments = ("feature_sizes", "embedding_width")

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

    def call(self, inputs):
        inputs = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        shape, sizes = inputs.shape, self.feature_sizes
        fits = shape.rank == 2 and shape[1] in (None, len(sizes))
        required = f"[batch, {len(sizes)}], one id of each feature"
        require(fits, "inputs", required, f"shape {shape}", f"layer '{self.name}'")
        ids = tf.cast(as_row_numbers(inputs), tf.int64)
        rows, start = [], 0
        for number, column in enumerate(tf.unstack(ids, num=len(sizes), axis=1)):
            of = f"{self.name}, feature {number}"
            rows.append(dense_lookup.require_in_range(column, sizes[number], of) + start)
            start += sizes[number]
        return tf.cast(self._table(tf.stack(rows, axis=1)), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return (*tuple(input_shape), self.embedding_width)
