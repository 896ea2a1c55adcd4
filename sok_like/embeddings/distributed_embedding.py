"""`sok.DistributedEmbedding`: keys of several feature fields, combined within each field.

`EmbeddingLayer` is what it shares with `sok.All2AllDenseEmbedding`.
"""

from typing import Any

import tensorflow as tf

from sok_like.lookup.hash_lookup import HashFeature
from sok_like.lookup.ids import FlatIds, check_pad_key
from sok_like.lookup.table_layer import TableLayer
from sok_like.runtime.checks import check_combiner, check_integer, require, unmet, wrong_argument
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.runtime.ranks.lookup_options import check_gradient_scale, check_row_dtype
from sok_like.table.keys import as_key_dtype, check_dtype


class EmbeddingLayer(TableLayer):
    """A layer over one table of its name. `sok.DistributedEmbedding` tells the arguments."""

    # Methods of a subclass: the error for an input of another kind, and the check of its shape.
    _bad_input: Any
    _check_shape: Any
    _arguments: tuple[str, ...] = (
        *("max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num", "use_hashtable"),
        *("key_dtype", "embedding_initializer", "gradient_scale", "row_dtype", "wire_dtype"),
        "pad_key",
    )

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        *,
        gradient_scale: str = "auto",
        row_dtype: Any = None,
        wire_dtype: Any = None,
        pad_key: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.slot_num = check_integer("slot_num", slot_num)
        self.embedding_vec_size = check_integer("embedding_vec_size", embedding_vec_size)
        self.max_vocabulary_size_per_gpu = max_vocabulary_size_per_gpu
        if max_vocabulary_size_per_gpu is not None:
            name = "max_vocabulary_size_per_gpu"
            self.max_vocabulary_size_per_gpu = check_integer(name, max_vocabulary_size_per_gpu)
        self.use_hashtable = bool(use_hashtable)
        self.key_dtype = as_key_dtype(tf.int64 if key_dtype is None else key_dtype, self.name)
        self.embedding_initializer = tf.keras.initializers.get(
            "random_uniform" if embedding_initializer is None else embedding_initializer
        )
        self.gradient_scale = check_gradient_scale(gradient_scale)
        self.row_dtype = check_row_dtype(row_dtype, f"layer '{self.name}'", "row_dtype")
        self.wire_dtype = check_row_dtype(wire_dtype, f"layer '{self.name}'")
        self.pad_key = check_pad_key(pad_key, f"layer '{self.name}'")
        self._make_table(
            self.embedding_vec_size,
            key_dtype=self.key_dtype,
            initializer=self.embedding_initializer,
            capacity=self.max_vocabulary_size_per_gpu,
            use_hashtable=self.use_hashtable,
            dtype=self.row_dtype,
        )
        self.built = True

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
        (rows,) = self.look_up(training, [feature])
        return self.as_output(rows if shape is None else tf.reshape(rows, shape))

    def compute_output_spec(self, inputs, training=None):
        # Runs while a model is built, not in its first step; `call` is not traced then.
        if not isinstance(inputs, tf.keras.KerasTensor):
            raise self._bad_input(inputs)
        check_dtype(inputs.dtype)
        self._check_shape(inputs)
        shape = self.compute_output_shape(inputs.shape)
        return tf.keras.KerasTensor(shape, dtype=self.compute_dtype)


@tf.keras.utils.register_keras_serializable("sok_like")
class DistributedEmbedding(EmbeddingLayer):
    """Model-parallel `tf.nn.embedding_lookup_sparse` over a hash table.

    Args:
        combiner: "sum", "mean" or "sqrtn", in any case: reduces the rows of one field of one
            sample. The mean is over the valid keys; a field without keys gives zeros.
        max_vocabulary_size_per_gpu: Maximum number of keys per rank; None: no limit.
        embedding_vec_size: Length of a row.
        slot_num: Feature fields per sample. All share the table: keys must differ between fields.
        max_nnz: Maximum number of valid keys per field and sample.
        max_feature_num: Maximum number of valid keys per sample, in SOK 1.x. Here it is only
            checked. 1 (default) means `slot_num * max_nnz`.
        use_hashtable: False: keys are row numbers in `[0, max_vocabulary_size_per_gpu * ranks)`.
        key_dtype: int64, int32, uint64 or uint32; None: int64.
        embedding_initializer: Keras initializer or its name; uniform in [-0.05, 0.05] by default.
        pad_key, gradient_scale, wire_dtype: As in `sok.GroupEmbedding`; padding is an integer.
        row_dtype: The `dtype` of `sok.EmbeddingVariable`.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`.

    Input shape: integers, one of
        `tf.SparseTensor` of dense shape `[batch * slot_num, max_nnz]`, row `sample * slot_num +
        slot`; `tf.RaggedTensor` `[batch * slot_num, None]` or `[batch, slot_num, None]`; a dense
        tensor `[batch, slot_num]` (one key per field) or `[batch, slot_num, hotness]`.
        The batch may differ between steps and ranks, and may be 0.

    Output shape:
        `[batch, slot_num, embedding_vec_size]` in the layer's compute dtype.

    Raises:
        TypeError: the input is of another kind.
        ValueError: an argument is out of range, or a static shape is wrong.
        tf.errors.InvalidArgumentError: a field has more than `max_nnz` keys, a ragged sample has
            not `slot_num` fields, the number of rows is not a multiple of `slot_num`, or, with
            `use_hashtable=False`, a key is out of range.
    """

    _arguments = (*EmbeddingLayer._arguments, "combiner", "max_nnz", "max_feature_num")

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int = 1,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ):
        if isinstance(combiner, str):
            combiner = combiner.lower()  # SOK's documentation writes "Mean" and "Sum"
        if combiner == "none":
            required = "'sum', 'mean' or 'sqrtn'; sok.All2AllDenseEmbedding does not combine"
            raise wrong_argument("combiner", required, combiner)
        check_combiner(combiner)
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(*sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.combiner = combiner
        self.max_nnz = check_integer("max_nnz", max_nnz)
        self.max_feature_num = check_integer("max_feature_num", max_feature_num)
        most = self.slot_num * self.max_nnz
        required = f"in [1, slot_num * max_nnz] = [1, {most}]"
        require(self.max_feature_num <= most, "max_feature_num", required, max_feature_num)

    def request(self, inputs):
        combiner, problem = self.combiner, None
        if isinstance(inputs, tf.SparseTensor):
            fits = inputs.shape.rank in (None, 2)
        elif isinstance(inputs, tf.RaggedTensor):
            fits = inputs.flat_values.shape.rank == 1 and inputs.shape.rank in (2, 3)
            if fits and inputs.shape.rank == 3:
                fields = inputs.row_lengths()
                wrong = tf.boolean_mask(fields, tf.not_equal(fields, self.slot_num))[:1]
                required = f"A sample must have slot_num={self.slot_num} fields. Received: "
                text = tf.concat([[required], tf.strings.as_string(wrong)], 0)
                is_right = tf.equal(tf.size(wrong), 0)
                problem = tf.where(is_right, "", tf.strings.reduce_join(text))
                inputs = inputs.values  # [batch * slot_num, None]
        else:
            fits = tf.is_tensor(inputs) and inputs.shape.rank in (2, 3)
            if fits and self._dense_hotness(inputs) == 1:
                combiner = None  # with one key per field the result is its row
        if not fits:
            raise self._bad_input(inputs)
        flat = FlatIds(inputs, combiner, hashed=True, pad_key=self.pad_key)
        of_keys = flat.ids, flat.combiner, flat.row_splits
        limits = {"max_hotness": self.max_nnz, "batch_multiple": self.slot_num}
        more = {"declared": self.combiner, "problem": problem}
        feature = HashFeature(self.table, *of_keys, **limits, **more)
        return feature, [-1, self.slot_num, self.embedding_vec_size]

    def _dense_hotness(self, inputs):
        """Keys per field, None if unknown; raises if the static shape is wrong."""
        shape = tuple(inputs.shape)
        if len(shape) not in (2, 3) or shape[1] not in (None, self.slot_num):
            raise self._bad_input(inputs)
        hotness = 1 if len(shape) == 2 else shape[2]
        # With padding only the op knows the number of valid keys.
        if hotness is not None and hotness > self.max_nnz and self.pad_key is None:
            required = f"hold at most max_nnz={self.max_nnz} keys"
            received = f"{hotness} in an input of shape {inputs.shape}"
            raise unmet("A field", required, received, f"layer '{self.name}'")
        return hotness

    def _bad_input(self, inputs):
        return TypeError(
            f"The input must be a tf.SparseTensor [batch * {self.slot_num}, {self.max_nnz}], a "
            f"tf.RaggedTensor [batch * {self.slot_num}, None] or [batch, {self.slot_num}, None], "
            f"or a dense tensor [batch, {self.slot_num}] or [batch, {self.slot_num}, hotness]. "
            f"Received: {inputs!r} (layer '{self.name}')"
        )

    def compute_output_shape(self, input_shape):
        batch, *per_sample = input_shape
        # Sparse or ragged [batch * slot_num, ...].
        if batch is not None and len(per_sample) == 1 and per_sample[0] != self.slot_num:
            batch //= self.slot_num
        return (batch, self.slot_num, self.embedding_vec_size)

    def _check_shape(self, inputs):
        if not (getattr(inputs, "sparse", False) or getattr(inputs, "ragged", False)):
            self._dense_hotness(inputs)
