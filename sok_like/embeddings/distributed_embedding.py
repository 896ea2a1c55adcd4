"""`sok.DistributedEmbedding`: keys of several feature fields, combined within each field."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.embeddings.base import EmbeddingLayer
from sok_like.lookup.hash_lookup import HashFeature
from sok_like.lookup.sparse_ids import samples_of
from sok_like.runtime.checks import check_combiner, check_integer
from sok_like.table.keys import as_keys, check_dtype


@tf.keras.utils.register_keras_serializable("sok_like")
class DistributedEmbedding(EmbeddingLayer):
    """Model-parallel `tf.nn.embedding_lookup_sparse` over a hash table.

    Args:
        combiner: "sum" or "mean" (also "sqrtn"), in any case: how the rows of one field of one
            sample become one. The mean is over the valid keys; a field without keys gives zeros.
        max_vocabulary_size_per_gpu: Most keys a rank may hold; None grows without bound.
        embedding_vec_size: Row width.
        slot_num: Feature fields of a sample.
        max_nnz: Most valid keys in one field of one sample.
        max_feature_num: Most valid keys in a sample. Memory here is sized by what arrives, so it is
            only checked; 1, the default, stands for `slot_num * max_nnz`.
        use_hashtable: False: keys are row indices in `[0, max_vocabulary_size_per_gpu * ranks)`.
        key_dtype: int64, int32, uint64 or uint32; None stands for int64.
        embedding_initializer: Keras initializer or its name; uniform in [-0.05, 0.05] by default.
        pad_key: Keys of this value are padding: not in the sum or mean, not inserted, not trained.
            None, the default: no padding, so -1 is a key that gets a row and trains it.
        **kwargs: `gradient_scale` and `wire_dtype` (see `EmbeddingLayer`), and Keras' own `name`,
            `dtype`, `trainable`.

    Input shape: integers, one of
        `tf.SparseTensor` of dense shape `[batch * slot_num, max_nnz]`, row `sample * slot_num +
        slot`; `tf.RaggedTensor` `[batch * slot_num, None]` or `[batch, slot_num, None]`; a dense
        tensor `[batch, slot_num]` (one key a field) or `[batch, slot_num, hotness]`.
        The batch may differ from step to step and from rank to rank, and may be 0.

    Output shape:
        `[batch, slot_num, embedding_vec_size]` in the layer's compute dtype.

    Raises:
        TypeError: the input is of another kind.
        ValueError: an argument or a static shape out of its range.
        tf.errors.InvalidArgumentError: a field with more than `max_nnz` keys, a number of rows that
            is not a multiple of `slot_num`, or without a hash table a key out of range.
    """

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
            combiner = combiner.lower()  # SOK's documents write "Mean" and "Sum"
        if combiner == "none":
            raise ValueError(
                "`combiner` must be 'sum', 'mean' or 'sqrtn'; sok.All2AllDenseEmbedding does not "
                "combine. Received: combiner='none'"
            )
        check_combiner(combiner)
        super().__init__(
            max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
            embedding_vec_size=embedding_vec_size,
            slot_num=slot_num,
            use_hashtable=use_hashtable,
            key_dtype=key_dtype,
            embedding_initializer=embedding_initializer,
            **kwargs,
        )
        max_nnz = check_integer("max_nnz", max_nnz)
        max_feature_num = check_integer("max_feature_num", max_feature_num)
        if max_feature_num > self.slot_num * max_nnz:
            raise ValueError(
                "`max_feature_num` must lie in [1, slot_num * max_nnz] = "
                f"[1, {self.slot_num * max_nnz}]. Received: max_feature_num={max_feature_num}"
            )
        self.combiner = combiner
        self.max_nnz = max_nnz
        self.max_feature_num = max_feature_num

    def request(self, inputs):
        keys, row_splits = self._samples(inputs)
        keys, row_splits = self.without_padding(as_keys(keys), row_splits)
        feature = HashFeature(
            self.table,
            keys,
            # One key a field: the row itself, whatever the combiner.
            combiner="none" if row_splits is None else self.combiner,
            row_splits=row_splits,
            max_hotness=self.max_nnz,
            batch_multiple=self.slot_num,
        )
        return feature, [-1, self.slot_num, self.embedding_vec_size]

    def _samples(self, inputs):
        """Flat keys and int64 row splits `[batch * slot_num + 1]`, None for one key per row."""
        if isinstance(inputs, tf.SparseTensor):
            if inputs.shape.rank not in (None, 2):
                raise self._bad_input(inputs)
            (samples,) = samples_of([inputs])
            return samples.keys, samples.row_splits
        if isinstance(inputs, tf.RaggedTensor):
            if inputs.flat_values.shape.rank != 1 or inputs.shape.rank not in (2, 3):
                raise self._bad_input(inputs)
            if inputs.shape.rank == 3:
                inputs = inputs.values  # [batch * slot_num, None]
                if not isinstance(inputs, tf.RaggedTensor):  # [batch * slot_num, hotness]
                    inputs = tf.RaggedTensor.from_tensor(inputs)
            return inputs.values, tf.cast(inputs.row_splits, tf.int64)
        if not tf.is_tensor(inputs) or inputs.shape.rank not in (2, 3):
            raise self._bad_input(inputs)
        flat = tf.reshape(inputs, [-1])
        if self._dense_hotness(inputs) == 1:
            return flat, None
        hotness = tf.shape(inputs, tf.int64)[2]
        rows = tf.shape(inputs, tf.int64)[0] * tf.shape(inputs, tf.int64)[1]
        return flat, tf.range(rows + 1) * hotness

    def _dense_hotness(self, inputs):
        """Keys in a field, None where unknown; raises where the static shape is wrong."""
        shape = tuple(inputs.shape)
        if len(shape) not in (2, 3) or shape[1] not in (None, self.slot_num):
            raise self._bad_input(inputs)
        hotness = 1 if len(shape) == 2 else shape[2]
        # With padding, only the op knows how many keys are valid.
        if hotness is not None and hotness > self.max_nnz and self.pad_key is None:
            raise ValueError(
                f"A field may hold at most max_nnz={self.max_nnz} keys. "
                f"Received: {hotness} in an input of shape {inputs.shape} (layer '{self.name}')"
            )
        return hotness

    def _bad_input(self, inputs):
        return TypeError(
            f"The input must be a tf.SparseTensor [batch * {self.slot_num}, {self.max_nnz}], a "
            f"tf.RaggedTensor [batch * {self.slot_num}, None] or [batch, {self.slot_num}, None], "
            f"or a dense tensor [batch, {self.slot_num}] or [batch, {self.slot_num}, hotness]. "
            f"Received: {inputs!r} (layer '{self.name}')"
        )

    def compute_output_shape(self, input_shape):
        shape = tuple(input_shape)
        batch = shape[0]
        if len(shape) == 2 and shape[1] != self.slot_num and batch is not None:
            batch //= self.slot_num  # sparse or ragged [batch * slot_num, ...]
        elif len(shape) == 2 and shape[1] != self.slot_num:
            batch = None
        return (batch, self.slot_num, self.embedding_vec_size)

    def compute_output_spec(self, inputs, training=True):
        import keras

        # As a model is built, not in its first step. `call` is not traced then.
        if not isinstance(inputs, keras.KerasTensor):
            raise self._bad_input(inputs)
        check_dtype(inputs.dtype)
        if not (getattr(inputs, "sparse", False) or getattr(inputs, "ragged", False)):
            self._dense_hotness(inputs)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "combiner": self.combiner,
            "max_nnz": self.max_nnz,
            "max_feature_num": self.max_feature_num,
        }
