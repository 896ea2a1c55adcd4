"""Whole shards as tensors: `sok.export` and `sok.assign`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype
from sok_like.table.variable import as_embedding_variable


def export(variable: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """All keys and rows of this rank's shard, at one instant, on the CPU.

    Args:
        variable: EmbeddingVariable.

    Returns:
        Keys `[size]` in the variable's key dtype, ascending as unsigned numbers, and rows
        float32 `[size, embedding_dim]`.

    Raises:
        TypeError: `variable` is not an EmbeddingVariable.
        tf.errors.InvalidArgumentError: a key does not fit the key dtype.
    """
    variable = as_embedding_variable(variable)
    snapshot = variable.snapshot(with_slots=False)
    return in_key_dtype(snapshot.keys, variable), snapshot.rows


def assign(variable: Any, keys: Any, rows: Any) -> Any:
    """Writes rows by key and inserts missing keys; if keys repeat, the last row wins.

    Every rank may pass any keys: each writes those that it owns and ignores the rest, so all ranks
    may pass the same full list. Slot rows of existing keys are unchanged.

    Args:
        variable: EmbeddingVariable.
        keys: `[num_keys]`, integers.
        rows: float32 `[num_keys, embedding_dim]`.

    Returns:
        None when eager; the op in a graph.

    Raises:
        TypeError: `variable` is not an EmbeddingVariable, keys are not integers, or rows are not
            real numbers.
        tf.errors.InvalidArgumentError: the shapes do not fit.
        tf.errors.ResourceExhaustedError: the table cannot hold all new keys, and does not evict by
            score; none was written.
    """
    variable = as_embedding_variable(variable)
    keys = tf.reshape(as_keys(keys), [-1])
    rows = as_rows(rows, "rows", variable.table_name)
    if comm.current().world_size > 1:
        mine = held_here(variable, keys)
        keys, rows = tf.boolean_mask(keys, mine), tf.boolean_mask(rows, mine)
    return libraries.ops().sok_table_assign(handle=variable.handle, keys=keys, rows=rows)
