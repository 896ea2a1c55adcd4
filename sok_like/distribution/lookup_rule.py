"""Embedding lookup in a sharded table: ranks exchange rows, never the table.

All ranks of a line along a model axis have the same ids, so each knows which rows are needed from
which owner, and one collective is enough:

    ('model', None)   unique ids, by owner -> own rows of them -> gathered -> rows of the ids
    (None, 'model')   own columns of the rows of the unique ids -> gathered

In the backward pass each rank takes the gradients of its own rows or columns out of the whole
gradient, without a collective. The gradient of Keras' Embedding has one value per occurrence of an
id, as in one process, because Keras 3's optimizers square them one by one.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.distribution.collectives import gather, with_length
from sok_like.distribution.sharded_variable import local_rows, shard_of
from sok_like.lookup.dense_lookup import as_row_numbers, require_in_range
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime import turns


def has_rule(table: Any) -> bool:
    """Whether one dimension of the table is sharded, and not along the batch axis."""
    shard = shard_of(table)
    return shard is not None and len(shard.placement.cuts) == 1 and not shard.over_batch


def unique_rows(table: Any, ids: tf.Tensor, table_name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of the unique ids, whole on every rank, and the position of each id's row.

    Args:
        table: A sharded variable with a rule, `[input_dim, output_dim]`.
        ids: Integers `[num_keys]`.

    Returns:
        `[num_unique, output_dim]` in the table's dtype, and `[num_keys]`.

    Raises:
        tf.errors.InvalidArgumentError: an id is outside the table.
    """
    shard: Any = shard_of(table)
    cut = shard.placement.cuts[0]
    line, path = shard.mesh.along(cut.axis), shard.placement.path
    ids = require_in_range(as_row_numbers(ids), shard.placement.global_shape[0], table_name)
    unique, inverse = tf.unique(ids)
    if cut.dim == 1:
        columns = local_rows(table, unique)
        whole = gather(columns, 1, line, f"{path}_columns")
        return with_length(whole, 1, cut.length), inverse

    name = unique_in_graph(f"{path}_rows")
    mine, position = _in_order_of_owners(unique, cut)

    def of_rows(rows):
        return tf.gather(turns.collective_in_turn(line, "all_gather", rows, name), position)

    start, _ = cut.bounds()
    exchange = _with_gradient(of_rows, lambda grad: tf.gather(grad, mine))
    return exchange(local_rows(table, tf.gather(unique, mine) - start)), inverse


def rows_by_occurrence(table: Any, ids: tf.Tensor, table_name: str) -> tf.Tensor:
    """As `unique_rows`, but a row for each id, `[num_keys, output_dim]`; so is the gradient."""
    shard: Any = shard_of(table)
    cut = shard.placement.cuts[0]
    line = shard.mesh.along(cut.axis)
    ids = require_in_range(as_row_numbers(ids), shard.placement.global_shape[0], table_name)
    unique, inverse = tf.unique(ids)
    places = tf.range(tf.size(ids))
    first = tf.math.unsorted_segment_min(places, inverse, tf.size(unique))

    if cut.dim == 1:
        name = f"{shard.placement.path}_columns"

        def of_columns(columns):
            columns = tf.gather(columns, first)
            whole = with_length(gather(columns, 1, line, name), 1, cut.length)
            return tf.gather(whole, inverse)

        start, stop = cut.bounds()
        return _with_gradient(of_columns, lambda grad: grad[:, start:stop])(local_rows(table, ids))

    name = unique_in_graph(f"{shard.placement.path}_rows")
    mine, position = _in_order_of_owners(unique, cut)
    is_mine = _owner(tf.cast(ids, tf.int64), cut.length, cut.num_shards) == cut.index
    own = tf.boolean_mask(places, is_mine)
    place_among_own = tf.cumsum(tf.cast(is_mine, tf.int32)) - 1

    def of_rows(rows):
        rows = tf.gather(rows, tf.gather(place_among_own, tf.gather(first, mine)))
        gathered = turns.collective_in_turn(line, "all_gather", rows, name)
        return tf.gather(tf.gather(gathered, position), inverse)

    start, _ = cut.bounds()
    exchange = _with_gradient(of_rows, lambda grad: tf.gather(grad, own))
    return exchange(local_rows(table, tf.gather(ids, own) - start))


def _with_gradient(function, back):
    return tf.custom_gradient(lambda rows: (function(rows), back))


def _in_order_of_owners(unique, cut):
    """Which of the unique ids this rank owns, and where the row of each unique id arrives."""
    owner = _owner(tf.cast(unique, tf.int64), cut.length, cut.num_shards)
    by_owner = tf.argsort(owner, stable=True)  # the order in which the ranks' rows arrive
    mine = tf.boolean_mask(by_owner, tf.gather(owner, by_owner) == cut.index)
    return mine, tf.math.invert_permutation(by_owner)


def _owner(ids, length, num_shards):
    """The shard that holds each id: shards before row `edge` have one row more."""
    size, longer = divmod(length, num_shards)
    edge = longer * (size + 1)
    return tf.where(ids < edge, ids // (size + 1), longer + (ids - edge) // max(size, 1))
