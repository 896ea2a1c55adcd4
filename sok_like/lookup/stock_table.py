"""A table as plain variables, looked up by TensorFlow's own ops: the content of a SavedModel.

    keys [n] --mix--> two buckets [n, 2] --gather--> 16 keys [n, 2, 8] --equal--> slot --> row

`sok_like/lookup/buckets.py` says how keys lie in buckets. Rows are in the order of the buckets
without gaps, so only keys have free slots; a table that can be refreshed has a row number per slot
instead (`placement.py`). Every 64-bit key is legal. A table without an index has none here either:
key k is row k.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_like.lookup.buckets import FACTORS, SLOTS, Layout
from sok_like.lookup.stock_rows import MissingRows

ROW_DTYPES = ("float32", "bfloat16", "int8")
LARGE = ("rows", "scales", "keys", "starts", "numbers")


class StockTable(tf.Module):
    """Keys and rows of a whole table, in host memory.

    Its large variables have shapes and no values: the ranks write these into the SavedModel.

    Args:
        variable: The EmbeddingVariable that it stands for.
        layout: The buckets; None for a table without an index.
        num_rows: Number of rows.
        row_dtype: One of `ROW_DTYPES`. Each int8 row has a bfloat16 scale.
        missing: The rows of missing keys.
        refreshable: Whether there is a row number per slot.
    """

    def __init__(
        self,
        variable: Any,
        layout: Layout | None,
        num_rows: int,
        row_dtype: str,
        missing: MissingRows,
        refreshable: bool = False,
    ):
        super().__init__(name="table")
        self.table_name, self.dim = variable.table_name, variable.dim
        self.key_limit = variable.key_limit
        self.missing, self.layout = missing, layout
        dtype, number = tf.as_dtype(row_dtype), number_dtype(num_rows)
        # For `sok.find_key`; no lookup reads it.
        about = {"table": self.table_name, "layout": layout}
        with tf.device("/CPU:0"):
            self.about = tf.Variable(json.dumps(about), trainable=False, name="about")
        self.rows = without_value([num_rows, self.dim], dtype, "rows")
        self.scales = self.keys = self.starts = self.numbers = None
        if dtype == tf.int8:
            self.scales = without_value([num_rows], tf.bfloat16, "scales")
        if layout is not None:
            self.keys = without_value([layout.num_buckets, SLOTS], tf.int64, "keys")
            if refreshable:
                self.numbers = without_value([layout.num_buckets * SLOTS], number, "numbers")
            else:
                self.starts = without_value([layout.num_buckets], number, "starts")

    def large(self) -> dict[str, tf.Variable]:
        """The variables without values, by name."""
        variables = ((name, getattr(self, name)) for name in LARGE)
        return {name: variable for name, variable in variables if variable is not None}

    def __call__(self, keys: tf.Tensor) -> tf.Tensor:
        """Rows of int64 keys `[num_keys]`, float32 `[num_keys, dim]`."""
        if self.layout is None:
            wrong = (keys < 0) | (keys >= self.key_limit)
            rule = f"Keys of table '{self.table_name}' must be in [0, {self.key_limit}). Received:"
            check = tf.debugging.Assert(~tf.reduce_any(wrong), [rule, tf.boolean_mask(keys, wrong)])
            with tf.control_dependencies([] if check is None else [check]):
                return self._decoded(tf.identity(keys))
        buckets = _choices(keys, self.layout)
        same = tf.equal(tf.gather(self.keys, buckets), keys[:, tf.newaxis, tf.newaxis])
        # Of each key found its number, in ascending order, which of its buckets, and the slot.
        at = tf.where(same)
        present = self._decoded(self._rows_at(tf.gather_nd(buckets, at[:, :2]), at[:, 2]))

        def filled():
            rows = tf.zeros([tf.size(keys), self.dim])
            if not self.missing.is_zero:
                absent = tf.where(~tf.reduce_any(same, [1, 2]))
                initial = self.missing(tf.gather_nd(keys, absent))
                rows = tf.tensor_scatter_nd_update(rows, absent, initial)
            return tf.tensor_scatter_nd_update(rows, at[:, :1], present)

        # Only batches with missing keys pay for their rows.
        return tf.cond(tf.equal(tf.shape(at)[0], tf.size(keys)), lambda: present, filled)

    def _rows_at(self, bucket, slot):
        """Row numbers of the keys in these slots `[num_found]` of buckets `[num_found]`."""
        if self.numbers is not None:
            return tf.gather(self.numbers, bucket * SLOTS + slot)
        start = tf.gather(self.starts, bucket)
        return start + tf.cast(slot, start.dtype)

    def _decoded(self, rows):
        values = tf.cast(tf.gather(self.rows, rows), tf.float32)
        if self.scales is None:
            return values
        return values * tf.cast(tf.gather(self.scales, rows), tf.float32)[:, tf.newaxis]


def _choices(keys, layout):
    """`buckets.choices` by TensorFlow's ops, `[num_keys, 2]`."""
    hashed = tf.bitcast(keys ^ layout.salt, tf.uint64)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        hashed = (hashed ^ _right(hashed, shift)) * _word(factor)
    hashed ^= _right(hashed, 31)
    first = _right((hashed & _word(2**32 - 1)) * _word(layout.num_buckets), 32)
    second = first ^ (_right(_right(hashed, 32) * _word(layout.width - 1), 32) + _word(1))
    return tf.bitcast(tf.stack([first, second], 1), tf.int64)


def _right(words, bits):
    return tf.bitwise.right_shift(words, _word(bits))


def _word(number):
    return tf.constant(number, tf.uint64)


def without_value(shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable in host memory of which only the shape takes memory."""
    with tf.device("/CPU:0"):
        return resource_variable_ops.UninitializedVariable(
            trainable=False, shape=shape, dtype=dtype, name=name
        )


def number_dtype(num_rows: int) -> Any:
    """The NumPy dtype of numbers of rows."""
    return np.int32 if num_rows < 2**31 else np.int64


def encoded(rows: np.ndarray, dtype: tf.DType, table_name: str) -> list[tf.Tensor]:
    """Rows float32 `[n, dim]` in the dtype of an export; for int8 their scales `[n]`, too."""
    if dtype != tf.int8:
        return [tf.cast(rows, dtype)]
    values, scales = _quantized(rows, table_name)
    return [tf.constant(values), tf.cast(scales, tf.bfloat16)]


def _quantized(rows, table_name):
    """int8 rows `[n, dim]` and their bfloat16 scales `[n]`; the largest element becomes 127."""
    if not np.isfinite(rows).all():
        raise ValueError(
            f"`row_dtype` int8 needs finite rows. Received: NaN or infinite ones (table "
            f"'{table_name}')"
        )
    wanted = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)
    # Rounded up to bfloat16, the upper half of a float32.
    bits = (wanted.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    divisor = np.where(scales > 0, scales, np.float32(1))
    return np.rint(rows / divisor[:, np.newaxis]).astype(np.int8), scales
