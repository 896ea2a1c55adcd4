"""Ids of any kind as flat ids by sample, without padding, and the Keras mask of their rows.

    dense  [[7, 8, 0], [9, 0, 0]]     pad_key=0; or ragged, or sparse; integers or strings
    ids         [7, 8, 9]             what is looked up: keys of a hash table, or row numbers
    row_splits  [0, 2, 3]             where samples begin
    mask   [[T, T, F], [T, F, F]]     what Keras' layers get beside the rows

The mask of a model of Keras 3 is a node of its graph, as that of `Embedding(mask_zero=True)` is.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup import exporting
from sok_like.runtime.checks import as_integer, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.native import libraries
from sok_like.table.keys import as_keys, fingerprints, keys_of


def flat_values(values: Any) -> tf.Tensor:
    """The values of a tensor of any kind, `[num_values]`."""
    if isinstance(values, tf.SparseTensor):
        return values.values
    if isinstance(values, tf.RaggedTensor):
        return values.flat_values
    return values if values.shape.rank == 1 else tf.reshape(values, [-1])


def with_flat_values(values: Any, flat: tf.Tensor) -> Any:
    """A tensor of the same kind and shape with other values."""
    if isinstance(values, tf.SparseTensor):
        return tf.SparseTensor(values.indices, flat, values.dense_shape)
    if isinstance(values, tf.RaggedTensor):
        return values.with_flat_values(flat)
    return tf.ensure_shape(tf.reshape(flat, tf.shape(values)), values.shape)


def num_samples(values: Any) -> tf.Tensor:
    """The number of samples of a tensor of any kind, int64."""
    if isinstance(values, tf.RaggedTensor):
        return values.nrows(tf.int64)
    return tf.shape(values, tf.int64)[0]


def as_row_numbers(ids):
    """Integers as int32 or int64; uint64 ids that do not fit become negative: outside of tables."""
    if ids.dtype in (tf.int32, tf.int64):
        return ids
    return tf.cast(ids, tf.int32 if ids.dtype.size < 4 else tf.int64)


def keys_of_ids(values: Any) -> tf.Tensor:
    """int64 keys of integers, or of strings, in a tensor of any kind."""
    if isinstance(values, (tf.RaggedTensor, tf.SparseTensor)):
        return with_flat_values(values, keys_of_ids(flat_values(values)))
    if values.dtype == tf.string:
        return fingerprints(values, stock=exporting.current() is not None)
    return as_keys(values)


class FlatIds:
    """An input of any kind as flat ids, without padding, and the shape of its output."""

    # `row_splits` are int64 `[batch + 1]`. If each id has a row, they are `[0]`, and `combiner` is
    # "none". Without a `dtype`, int32 row numbers stay as they are.

    def __init__(
        self,
        ids: Any,
        combiner: str | None,
        hashed: bool = False,
        pad_key: int | str | None = None,
        dtype: tf.DType | None = tf.int64,
    ):
        self._batch, self._combiner = ids.shape[:1], combiner
        self._source = ids = as_ragged(ids, hashed) if isinstance(ids, tf.SparseTensor) else ids
        values = flat_values(ids)
        values = as_keys(values) if hashed else as_row_numbers(values)
        self.ids = values if dtype is None else tf.cast(values, dtype)
        if combiner is None:
            self.row_splits = tf.constant([], tf.int64)
        elif isinstance(ids, tf.RaggedTensor):
            self.row_splits = tf.cast(ids.row_splits, tf.int64)
        else:
            # Numbers that are known take no ops: 26 features of an eager call would need hundreds.
            num_samples, hotness = ids.shape[:-1].num_elements(), ids.shape[-1]
            if num_samples is None or hotness is None:
                shape = tf.shape(ids, tf.int64)
                num_samples, hotness = tf.reduce_prod(shape[:-1]), shape[-1]
            self.row_splits = tf.range(num_samples + 1, dtype=tf.int64) * hotness
        self.combiner = combiner or "none"
        if pad_key is not None:
            # Without a combiner each position is a sample of one key, or of none if it is padding.
            is_key = valid(self.ids, pad_key)
            before = tf.concat([[0], tf.cumsum(tf.cast(is_key, tf.int64))], 0)
            self.row_splits = before if combiner is None else tf.gather(before, self.row_splits)
            self.ids, self.combiner = tf.boolean_mask(self.ids, is_key), combiner or "sum"

    def restore(self, rows: tf.Tensor) -> Any:
        """Rows `[num_keys, dim]`, or combined `[batch, dim]`, in the shape of the output."""
        ids, dim = self._source, rows.shape[-1]
        is_combined, is_ragged = self._combiner is not None, isinstance(ids, tf.RaggedTensor)
        if is_ragged and not is_combined:
            return ids.with_flat_values(rows)
        static = ids.shape[:-1] if is_combined else ids.shape
        static = self._batch if is_ragged else static
        if static.rank == 1:
            rows.set_shape(static.concatenate([dim]))
            return rows
        leading = tf.shape(ids)[:-1] if is_combined else tf.shape(ids)
        rows = tf.reshape(rows, tf.concat([leading, [dim]], 0))
        return tf.ensure_shape(rows, static.concatenate([dim]))


class KeySamples(NamedTuple):
    """Keys of a table, by sample."""

    keys: tf.Tensor  # int64 `[num_keys]`
    row_splits: tf.Tensor | None  # int64, or int32 as given, `[batch + 1]`; None: a row per key
    weights: tf.Tensor | None  # floats `[num_keys]`, or None for ones


def samples_of(
    sparse: Sequence[tf.SparseTensor], weights: Sequence[Any] | None = None
) -> list[KeySamples]:
    """Keys of hash tables by sample, by one op for all; ids and weights may be in any order."""
    if not sparse:
        return []
    keys = [as_keys(s.values) for s in sparse]
    weights = [None] * len(sparse) if weights is None else weights
    floats = [None if w is None else tf.cast(w, tf.float32) for w in weights]
    if exporting.current() is not None:
        by_table = []
        for s, flat, w in zip(sparse, keys, floats, strict=True):
            ordered = tf.sparse.reorder(with_flat_values(s, flat))
            w = None if w is None else tf.sparse.reorder(with_flat_values(s, w)).values
            by_table.append(KeySamples(ordered.values, row_splits(ordered), w))
        return by_table
    with tf.device("CPU:0"):
        samples = libraries.ops().sok_sparse_samples(
            indices=[s.indices for s in sparse],
            keys=keys,
            weights=[tf.zeros([0]) if w is None else w for w in floats],
            dense_shapes=[s.dense_shape for s in sparse],
        )
    sorted_weights = zip(floats, samples.sorted_weights, strict=True)
    of_keys = [None if w is None else ordered for w, ordered in sorted_weights]
    return list(map(KeySamples, samples.sorted_keys, samples.row_splits, of_keys))


def samples_by_table(
    samples: tf.RaggedTensor, weights: tf.Tensor | None, table_splits: tf.Tensor, num_tables: int
) -> list[KeySamples]:
    """Keys of hash tables by table and sample, with one op for all tables."""
    # `table_splits` `[num_tables + 1]` has the first sample of each table, and the end.
    floats = None if weights is None else tf.cast(weights, tf.float32)
    with tf.device("CPU:0"):
        by_table = libraries.ops().sok_group_samples(
            keys=as_keys(samples.values),
            weights=tf.zeros([0]) if floats is None else floats,
            table_splits=tf.cast(table_splits, tf.int64),
            row_splits=tf.cast(samples.row_splits, tf.int64),
            N=num_tables,
        )
    return [
        KeySamples(keys, splits, None if floats is None else its_weights)
        for keys, its_weights, splits in zip(*by_table, strict=True)
    ]


def as_ragged(sparse: tf.SparseTensor, hashed: bool = False) -> tf.RaggedTensor:
    """Sparse ids as ragged ids `[batch, None]`; with `hashed` as int64 keys of hash tables."""
    if hashed and sparse.shape.rank == 2:
        (samples,) = samples_of([sparse])
        return tf.RaggedTensor.from_row_splits(samples.keys, samples.row_splits, validate=False)
    # TensorFlow's own lookups raise if samples are not in order, but that would leave the other
    # ranks waiting.
    sparse = tf.sparse.reorder(sparse)
    return tf.RaggedTensor.from_row_splits(sparse.values, row_splits(sparse), validate=False)


def row_splits(sparse: tf.SparseTensor) -> tf.Tensor:
    """int64 `[batch + 1]`: where samples begin in an ordered SparseTensor, by half the ops."""
    samples = tf.range(sparse.dense_shape[0] + 1)
    return tf.raw_ops.LowerBound(
        sorted_inputs=sparse.indices[tf.newaxis, :, 0],
        values=samples[tf.newaxis],
        out_type=tf.int64,
    )[0]


def check_pad_key(pad_key: Any, of: str) -> int | None:
    """`pad_key` as an int; ValueError unless it is None or an integer of 64 bits."""
    if pad_key is None:
        return None
    integer = as_integer(pad_key)
    if integer is None or not -(2**63) <= integer < 2**64:
        raise wrong_argument("pad_key", "None or an integer of 64 bits", pad_key, of)
    return integer


def valid(keys: tf.Tensor, pad_key: int | str) -> tf.Tensor:
    """Whether int64 keys are not padding."""
    if isinstance(pad_key, str):
        return tf.not_equal(keys, keys_of(pad_key))
    bits = (pad_key + 2**63) % 2**64 - 2**63  # of uint64 as int64, as in `as_keys`
    return tf.not_equal(keys, tf.constant(bits, tf.int64))


def mask_of(ids: Any, pad_key: int | str | None, shape: Any = None) -> Any:
    """The mask of rows of ids that are looked up without a combiner; None without a `pad_key`."""
    if pad_key is None:
        return None
    if is_keras_3() and isinstance(ids, tf.keras.KerasTensor):
        return PaddingMask(pad_key, shape)(ids)
    ids = ids if tf.is_tensor(ids) else tf.convert_to_tensor(ids)
    if isinstance(ids, tf.SparseTensor):
        ids = as_ragged(ids)
    mask = valid(keys_of_ids(ids), pad_key)
    if shape is not None and not isinstance(mask, tf.RaggedTensor):
        mask = tf.reshape(mask, shape)
    mask._sok_padding = True  # for `_warn_of_lost_masks`
    return mask


@tf.keras.utils.register_keras_serializable("sok_like")
class PaddingMask(tf.keras.Operation if is_keras_3() else object):  # type: ignore[misc]
    """`mask_of` in the graph of a functional model of Keras 3."""

    def __init__(self, pad_key, shape=None, name=None):
        super().__init__(**({"name": name} if is_keras_3() else {}))
        self.pad_key = pad_key
        self.shape = None if shape is None else list(shape)

    def call(self, ids):
        return mask_of(ids, self.pad_key, self.shape)

    def compute_output_spec(self, ids):
        shape = ids.shape
        if self.shape is not None:
            shape = [None if size == -1 else size for size in self.shape]
        ragged = getattr(ids, "ragged", False) or getattr(ids, "sparse", False)
        return tf.keras.KerasTensor(shape, dtype="bool", ragged=ragged)

    def get_config(self):
        return {"pad_key": self.pad_key, "shape": self.shape, "name": self.name}


def _warn_of_lost_masks(own, self, inputs, input_list, *args, **kwargs):
    lost = not self._supports_masking and not self._expects_mask_arg
    masks = [getattr(x, "_keras_mask", None) for x in input_list] if lost else []
    if any(getattr(mask, "_sok_padding", False) for mask in masks):
        warnings.warn(
            f"Layer '{self.name}' (of type {type(self).__name__}) does not support masking, so the "
            "layers after it do not get the mask of padding and count padding as ids. Pass them "
            "the mask by hand: layer(rows, mask=...)",
            stacklevel=2,
        )
    return own(self, inputs, input_list, *args, **kwargs)


@hooks.at_init
def _install():
    if not is_keras_3():
        why = "warns where the mask of padding is lost, as Keras 3 does"
        hooks.wrap(tf.keras.layers.Layer, "_get_input_masks", _warn_of_lost_masks, why)
