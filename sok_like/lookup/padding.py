"""Padding among ids: ids that are no keys, and the Keras mask of the rows looked up for them.

    ids    [[7, 8, 0], [9, 0, 0]]     pad_key=0
    keys   [7, 8, 9]                  what is looked up
    mask   [[T, T, F], [T, F, F]]     what Keras' layers get beside the rows

The mask of a model of Keras 3 is a node of its graph, as that of `Embedding(mask_zero=True)` is.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from sok_like.lookup import exporting
from sok_like.lookup.sparse_ids import as_ragged
from sok_like.runtime.checks import as_integer, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.table.keys import as_keys, fingerprints, keys_of


def check_pad_key(pad_key: Any, of: str) -> int | None:
    """`pad_key` as an int; ValueError unless it is None or an integer of 64 bits."""
    if pad_key is None:
        return None
    integer = as_integer(pad_key)
    if integer is None or not -(2**63) <= integer < 2**64:
        raise wrong_argument("pad_key", "None or an integer of 64 bits", pad_key, of)
    return integer


def keys_of_ids(values: Any) -> tf.Tensor:
    """int64 keys of integers, or of strings."""
    if values.dtype == tf.string:
        return fingerprints(values, stock=exporting.current() is not None)
    return as_keys(values)


def valid(keys: tf.Tensor, pad_key: int | str) -> tf.Tensor:
    """Whether int64 keys are not padding."""
    if isinstance(pad_key, str):
        return tf.not_equal(keys, keys_of(pad_key))
    bits = (pad_key + 2**63) % 2**64 - 2**63  # of uint64 as int64, as in `as_keys`
    return tf.not_equal(keys, tf.constant(bits, tf.int64))


def without(
    pad_key: int | str, keys: tf.Tensor, row_splits: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys without padding, and their row splits; None: each key was a sample of its own."""
    is_key = valid(keys, pad_key)
    before = tf.concat([[0], tf.cumsum(tf.cast(is_key, tf.int64))], 0)
    splits = before if row_splits is None else tf.gather(before, row_splits)
    return tf.boolean_mask(keys, is_key), splits


def mask_of(ids: Any, pad_key: int | str | None, shape: Any = None) -> Any:
    """The mask of rows that are looked up without a combiner: True where ids are not padding.

    Without a `pad_key` there is none. Ids are of any kind, also a symbol of Keras 3; `shape` is
    that of the mask if it differs from theirs.
    """
    if pad_key is None:
        return None
    if is_keras_3() and isinstance(ids, tf.keras.KerasTensor):
        return PaddingMask(pad_key, shape)(ids)
    ids = ids if tf.is_tensor(ids) else tf.convert_to_tensor(ids)
    if isinstance(ids, tf.SparseTensor):
        ids = as_ragged(ids)
    if isinstance(ids, tf.RaggedTensor):
        mask = ids.with_flat_values(valid(keys_of_ids(ids.flat_values), pad_key))
    else:
        mask = valid(keys_of_ids(ids), pad_key)
        mask = mask if shape is None else tf.reshape(mask, shape)
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

    @classmethod
    def from_config(cls, config):
        return cls(**config)


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
