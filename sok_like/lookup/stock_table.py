"""A table as plain variables, looked up by TensorFlow's own ops: the content of a SavedModel.

    keys [n] --mix--> two buckets [n, 2] --gather--> 16 keys [n, 16] --equal--> slot --> row

`sok_like/lookup/buckets.py` says how keys lie in buckets. Rows are in the order of the buckets
without gaps, so only keys have free slots; a table that can be refreshed has a row number per slot
instead (`placement.py`). Every 64-bit key is legal. A table without an index has none here either:
key k is row k.
"""

from __future__ import annotations

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
        self.rows = _without_value([num_rows, self.dim], dtype, "rows")
        self.scales = self.keys = self.starts = self.numbers = None
        if dtype == tf.int8:
            self.scales = _without_value([num_rows], tf.bfloat16, "scales")
        if layout is not None:
            self.keys = _without_value([layout.num_buckets, SLOTS], tf.int64, "keys")
            if refreshable:
                self.numbers = _without_value([layout.num_buckets * SLOTS], number, "numbers")
            else:
                self.starts = _without_value([layout.num_buckets], number, "starts")

    def large(self) -> dict[str, tf.Variable]:
        """The variables without values, by name."""
        each = ((name, getattr(self, name)) for name in LARGE)
        return {name: variable for name, variable in each if variable is not None}

    def __call__(self, keys: tf.Tensor) -> tf.Tensor:
        """Rows of int64 keys `[num_keys]`, float32 `[num_keys, dim]`."""
        if self.layout is None:
            return self._decoded(self._in_range(keys))
        rows, present = self._find(keys)
        found = tf.where(present[:, tf.newaxis], self._decoded(rows), 0.0)
        if self.missing.is_zero:
            return found

        def filled():
            at = tf.where(~present)
            return tf.tensor_scatter_nd_update(found, at, self.missing(tf.gather_nd(keys, at)))

        # Only batches with missing keys pay for their rows.
        return tf.cond(tf.reduce_all(present), lambda: found, filled)

    def _in_range(self, keys):
        wrong = (keys < 0) | (keys >= self.key_limit)
        check = tf.debugging.Assert(
            ~tf.reduce_any(wrong),
            [
                f"Keys of table '{self.table_name}' must be in [0, {self.key_limit}). Received:",
                tf.boolean_mask(keys, wrong),
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(keys)

    def _find(self, keys):
        """Row numbers `[num_keys]`, 0 for missing keys, and bool `[num_keys]`: whether present."""
        buckets = _choices(keys, self.layout)
        same = tf.equal(tf.gather(self.keys, buckets), keys[:, tf.newaxis, tf.newaxis])
        same = tf.cast(tf.reshape(same, [-1, 2 * SLOTS]), tf.float32)
        # At most one slot has the key, so the sum of slot numbers (from 1) is its number.
        numbers = tf.range(1, 2 * SLOTS + 1, dtype=tf.float32)
        slot = tf.cast(tf.linalg.matvec(same, numbers), tf.int32)
        present = slot > 0
        slot = tf.where(present, slot - 1, 0)
        bucket = tf.where(slot < SLOTS, buckets[:, 0], buckets[:, 1])
        in_bucket = tf.math.floormod(slot, SLOTS)
        if self.numbers is None:
            row = tf.gather(self.starts, bucket)
            row += tf.cast(in_bucket, row.dtype)
        else:
            row = tf.gather(self.numbers, bucket * SLOTS + tf.cast(in_bucket, bucket.dtype))
        return tf.where(present, row, tf.zeros_like(row)), present

    def _decoded(self, rows):
        values = tf.cast(tf.gather(self.rows, rows), tf.float32)
        if self.scales is None:
            return values
        return values * tf.cast(tf.gather(self.scales, rows), tf.float32)[:, tf.newaxis]


def _choices(keys, layout):
    """`buckets.choices` by TensorFlow's ops, `[num_keys, 2]`."""
    hashed = keys ^ layout.salt
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        hashed = (hashed ^ _right(hashed, shift)) * (factor - 2**64 if factor >> 63 else factor)
    hashed ^= _right(hashed, 31)
    first = _right((hashed & (2**32 - 1)) * layout.num_buckets, 32)
    second = first ^ (1 + _right(_right(hashed, 32) * (layout.width - 1), 32))
    return tf.stack([first, second], 1)


def _right(words, bits):
    """Shifts in zeros, as for unsigned numbers."""
    shifted = tf.bitwise.right_shift(words, tf.constant(bits, tf.int64))
    return shifted & (2 ** (64 - bits) - 1)


def _without_value(shape, dtype, name):
    with tf.device("/CPU:0"):
        return resource_variable_ops.UninitializedVariable(
            trainable=False, shape=shape, dtype=dtype, name=name
        )


def number_dtype(num_rows: int) -> Any:
    """The NumPy dtype of numbers of rows."""
    return np.int32 if num_rows < 2**31 else np.int64


def encoded(rows: np.ndarray, dtype: tf.DType, table_name: str) -> list[tf.Tensor]:
    """Rows float32 `[n, dim]` in the dtype of an export; for int8 their scales `[n]`, too.

    Raises:
        ValueError: int8 rows that are not finite.
    """
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
