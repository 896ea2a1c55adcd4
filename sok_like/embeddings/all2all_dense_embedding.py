"""`sok.All2AllDenseEmbedding`: one row per key."""

from typing import Any

import tensorflow as tf

from sok_like.embeddings.distributed_embedding import EmbeddingLayer
from sok_like.lookup.hash_lookup import HashFeature
from sok_like.lookup.ids import FlatIds, mask_of
from sok_like.runtime.checks import check_integer, unmet


@tf.keras.utils.register_keras_serializable("sok_like")
class All2AllDenseEmbedding(EmbeddingLayer):
    """Model-parallel `tf.nn.embedding_lookup` over a hash table.

    Args:
        max_vocabulary_size_per_gpu, embedding_vec_size, slot_num: See `sok.DistributedEmbedding`.
        use_hashtable, key_dtype, embedding_initializer: As there.
        nnz_per_slot: Keys per field.
        dynamic_input: True takes a flat list of keys instead, such as the output of `tf.unique`;
            its length may differ between ranks.
        pad_key: As in `sok.GroupEmbedding`; the mask is `[batch, slot_num, nnz_per_slot]`.
        **kwargs: `gradient_scale`, `row_dtype`, `wire_dtype` and Keras' own, as there.

    Input shape:
        Integers `[batch, slot_num, nnz_per_slot]`, or another shape with as many keys per sample,
        such as `[batch, slot_num * nnz_per_slot]`; with `dynamic_input`, `[num_keys]`.

    Output shape:
        `[batch, slot_num, nnz_per_slot, embedding_vec_size]` in the layer's compute dtype; with
        `dynamic_input`, `[num_keys, embedding_vec_size]`.

    Raises:
        TypeError: the input is not a dense tensor of integers.
        ValueError: an argument is out of range, or a static shape is wrong.
        tf.errors.InvalidArgumentError: the number of keys is not a multiple of `slot_num *
            nnz_per_slot`; with `use_hashtable=False`, a key is out of range.
    """

    _arguments = (*EmbeddingLayer._arguments, "nnz_per_slot", "dynamic_input")

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ):
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(*sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.nnz_per_slot = check_integer("nnz_per_slot", nnz_per_slot)
        self.dynamic_input = bool(dynamic_input)
        self.supports_masking = self.pad_key is not None

    def request(self, inputs):
        if not tf.is_tensor(inputs) or isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor)):
            raise self._bad_input(inputs)
        self._check_shape(inputs)
        # Each position is a sample of one key, or of none if it is padding.
        flat = FlatIds(inputs, None, hashed=True, pad_key=self.pad_key)
        multiple = 1 if self.dynamic_input else self.slot_num * self.nnz_per_slot
        of_keys = flat.ids, flat.combiner, flat.row_splits
        feature = HashFeature(self.table, *of_keys, batch_multiple=multiple)
        shape = [-1, self.slot_num, self.nnz_per_slot, self.embedding_vec_size]
        return feature, None if self.dynamic_input else shape

    def _bad_input(self, inputs):
        required = "be a dense tensor of integers"
        return unmet("The input", required, f"{inputs!r}", f"layer '{self.name}'", TypeError)

    def _check_shape(self, inputs):
        shape, of = tf.TensorShape(inputs.shape), f"layer '{self.name}'"
        if self.dynamic_input:
            if shape.rank not in (None, 1):
                required = "be a flat list of keys, [num_keys]"
                raise unmet("With dynamic_input=True the input", required, f"shape {shape}", of)
            return
        per_sample = shape[1:].num_elements() if shape.rank else None
        fits = per_sample in (None, self.slot_num * self.nnz_per_slot) and shape.rank not in (0, 1)
        if not fits:
            required = f"have the shape [batch, {self.slot_num}, {self.nnz_per_slot}]; a flat list "
            required += "of keys needs dynamic_input=True"
            raise unmet("The input", required, f"shape {shape}", of)

    def compute_output_shape(self, input_shape):
        batch, *_ = input_shape
        if self.dynamic_input:
            return (batch, self.embedding_vec_size)
        return (batch, self.slot_num, self.nnz_per_slot, self.embedding_vec_size)

    def compute_mask(self, inputs, mask=None):
        shape = None if self.dynamic_input else (-1, self.slot_num, self.nnz_per_slot)
        return mask_of(inputs, self.pad_key, shape)
