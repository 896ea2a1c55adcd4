"""The shards of a dense lookup, and inputs as flat ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup import padding
from sok_like.lookup.dense_lookup import as_row_numbers
from sok_like.lookup.sparse_ids import as_ragged
from sok_like.table.keys import as_keys


class LookupShard(NamedTuple):
    """One owner's columns of a table, or all columns of a table whose rows are on all ranks.

    `planner.Shard` describes what a rank holds; this describes where a lookup finds it.
    """

    # The rank that holds it, `exchange.ALL_RANKS`, or `exchange.BY_KEY` for a hash table.
    owner: int
    dim: int  # number of its columns
    row_offset: int  # its first row in the owner's variable
    kind: int  # kind of the table; see `planner.tables`
    position: int  # position of the variable among the owner's variables of that kind


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


class FlatIds:
    """An input of any kind as flat ids. It also gives looked-up rows the shape of the output.

    Attributes:
        ids: int64 `[num_keys]`, without padding.
        row_splits: int64 `[batch + 1]`; `[0]` if each id has a row.
        combiner: Of the lookup: "none" if each id has a row.
    """

    def __init__(
        self,
        ids: Any,
        combiner: str | None,
        hashed: bool = False,
        pad_key: int | str | None = None,
    ):
        if isinstance(ids, tf.SparseTensor):
            ids = as_ragged(ids, hashed)
        self._source, self._combiner = ids, combiner
        values = flat_values(ids)
        self.ids = as_keys(values) if hashed else tf.cast(as_row_numbers(values), tf.int64)
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
            splits = None if combiner is None else self.row_splits
            self.ids, self.row_splits = padding.without(pad_key, self.ids, splits)
            self.combiner = combiner or "sum"

    def restore(self, rows: tf.Tensor) -> Any:
        """Rows `[num_keys, dim]`, or combined `[batch, dim]`, in the shape of the output."""
        ids, dim = self._source, rows.shape[-1]
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(rows) if self._combiner is None else rows
        is_combined = self._combiner is not None
        static = ids.shape[:-1] if is_combined else ids.shape
        if static.rank == 1:
            rows.set_shape(static.concatenate([dim]))
            return rows
        leading = tf.shape(ids)[:-1] if is_combined else tf.shape(ids)
        rows = tf.reshape(rows, tf.concat([leading, [dim]], 0))
        return tf.ensure_shape(rows, static.concatenate([dim]))
