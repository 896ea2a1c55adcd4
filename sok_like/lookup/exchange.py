"""Lookup in dense and hash tables, on several ranks or on this one, from data-parallel ids.

    ids -> SokRoute =keys=> SokUnpackKeys -> gather -> SokPackRows =rows=> SokCombine -> embeddings
           back:            the variables' gradients <- SokUnpackRows <=gradients=

A feature is an input with one shard of its table. The shard has all rows on one rank (a slice of
columns), or some rows on each rank, or it is a hash table, whose rows are found by key and not
gathered. All features of a layer travel together: two collectives forward, one back. Each rank asks
for its distinct ids only.

If a rank fails before an exchange, its message carries the error as text. Every rank raises it
after the exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import hash_lookup as hash_lookup
from sok_like.lookup import same_weights
from sok_like.lookup.dense_lookup import legal_ids, require_in_range
from sok_like.runtime import ops as wrapped_ops
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.variable import is_embedding_variable

# Values of `owner`, also for the ops: rows on all ranks, and keys of a hash table.
ALL_RANKS, BY_KEY = -1, -2


@dataclasses.dataclass(frozen=True)
class ShardFeature:
    """Ids to look up in one shard of a table."""

    ids: tf.Tensor  # int64 [num_keys], flat
    # int64 [batch + 1], the position of each sample's first id; [0] if `combiner` is "none".
    row_splits: tf.Tensor
    combiner: str  # "sum", "mean", or "none" for one row per id; hash tables also have "sqrtn"
    table_name: str  # in errors
    # Of the whole table. 0 for a hash table by key, where every id is legal. A hash table on one
    # rank takes ids in `[0, num_rows)`, see `most_ids`.
    num_rows: int
    dim: int  # columns of this shard
    # The rank that holds it. `ALL_RANKS`: each rank holds a contiguous range of rows. `BY_KEY`:
    # rank `id % world_size` holds it; in a dense table as its row `id // world_size`.
    owner: int
    row_offset: int  # its first row in the owner's variable
    variable: Any  # this rank's rows: a tf.Variable, an EmbeddingVariable, or None
    weights: tf.Tensor | None = None  # float32 [num_keys]


def most_ids(world_size: int) -> int:
    """`num_rows` of a hash table that one rank holds: ids travel as `id * world_size + owner`."""
    return min(2**63 - 1, 2**64 // world_size - 1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the features of one lookup travel."""

    name: str  # of the collectives; the same on all ranks, and used by no other at the same time
    training: bool = True  # whether hash tables insert missing keys, or give their initial rows
    # `[0, 1]`, on a rank that has no trainable variable: it makes the rank's tape record the
    # exchange, so that the rank takes part in its gradient.
    anchor: tf.Variable | None = None
    gradient_scale: float | None = None  # factor of the gradients; None: 1 / number of ranks
    wire_dtype: str | None = None  # as in `hash_lookup.lookup`; the same on all ranks


def exchange_lookup(
    features: Sequence[ShardFeature], how: Exchange, problems: Sequence[tf.Tensor] = ()
) -> list[tf.Tensor]:
    """Looks features up wherever their rows are.

    Args:
        features: The same on all ranks, except for ids and variables.
        problems: Scalar strings, empty unless something already went wrong on this rank.

    Returns:
        One float32 tensor per feature: `[batch, dim]`, or `[num_keys, dim]` if the combiner is
        "none". The gradient of a row is the sum over the ranks that used it, divided by the number
        of ranks. This is the scale of averaged gradients of replicated variables.

    Raises:
        tf.errors.InvalidArgumentError: an id is outside its table, a hash table is full, or
            `problems` has one; on every rank, naming the rank where it happened.
    """
    ops, communicator = libraries.ops(), comm.current()
    world_size = communicator.world_size
    # What ranks must agree on: otherwise rows of another table or place would be misread.
    shards = [f"{f.num_rows}x{f.dim} of {f.owner} at {f.row_offset}{_rule(f)}" for f in features]
    statement = f"{how.name}: {', '.join(shards)}"
    lookup = exchange_order.Lookup(
        communicator, how.name, same_weights.comparison(), how.wire_dtype, statement
    )
    scale = 1.0 / world_size if how.gradient_scale is None else how.gradient_scale
    owners, dims = [f.owner for f in features], [f.dim for f in features]
    batch = {
        "keys": [f.ids for f in features],
        "row_splits": [f.row_splits for f in features],
        "weights": [tf.zeros([0]) if f.weights is None else f.weights for f in features],
        "table_names": [f.table_name for f in features],
        "dims": dims,
        "combiners": [f.combiner for f in features],
        "max_hotness": [0] * len(features),
        "key_limits": [f.num_rows for f in features],
        "batch_multiples": [1] * len(features),
    }
    with tf.name_scope("exchange"):
        routed = ops.sok_route(
            problems=list(problems),
            world_size=world_size,
            owners=owners,
            row_offsets=[f.row_offset for f in features],
            **batch,
        )
        with exchange_order.turn() as done:
            message, splits = exchange_order.exchange_keys(routed.message, routed.splits, lookup)
            local_rows = ops.sok_unpack_keys(
                message=message,
                splits=splits,
                N=len(features),
                world_size=world_size,
                owners=owners,
            )
            places, full_tables = _gather(features, local_rows, how.training, world_size)
            to_send = [
                tf.zeros([0, f.dim]) if place is None else tf.cast(tf.gather(*place), tf.float32)
                for f, place in zip(features, places, strict=True)
            ]
            if how.anchor is not None:
                none = tf.gather(how.anchor, tf.zeros([0], tf.int64))
                none = tf.cast(tf.reshape(none, [0, dims[0]]), tf.float32)
                to_send[0] = tf.concat([to_send[0], none], 0)
            rows, sent = ops.sok_pack_rows(
                rows=to_send,
                message=message,
                splits=splits,
                problems=full_tables,
                world_size=world_size,
                dims=dims,
                gradient_scale=scale,
            )
            rows, received, call = exchange_order.exchange_rows(rows, sent, lookup)
            done.append(call)
        return wrapped_ops.combine(rows, received, call, routed, batch)


def _rule(feature):
    """How rows of a feature are combined and, in a hash table, begin."""
    hashed = feature.owner == BY_KEY and is_embedding_variable(feature.variable)
    return f" {feature.combiner}" + (f" of {feature.variable.initial_rows}" if hashed else "")


def lookup_here(
    features: Sequence[ShardFeature], training: bool = True, name: str = "lookup"
) -> list[tf.Tensor]:
    """Looks up tables that are whole on this rank: without an exchange, in the tables' dtypes."""
    hashed = [
        hash_lookup.HashFeature(f.variable, f.ids, f.combiner, f.row_splits)
        for f in features
        if f.owner == BY_KEY
    ]
    by_key = iter(hash_lookup.lookup(hashed, training=training, name=name))
    dense = iter(_lookup_dense([f for f in features if f.owner != BY_KEY]))
    return [next(by_key if f.owner == BY_KEY else dense) for f in features]


def _lookup_dense(features):
    ids = [require_in_range(f.ids, f.num_rows, f.table_name) + f.row_offset for f in features]
    outputs = []
    places, _ = _gather(features, ids)
    for feature, (rows, inverse) in zip(features, places, strict=True):
        if feature.combiner == "none":
            outputs.append(tf.gather(rows, inverse))
            continue
        segment = tf.sparse.segment_sum if feature.combiner == "sum" else tf.sparse.segment_mean
        sample = tf.ragged.row_splits_to_segment_ids(feature.row_splits)
        batch = tf.size(feature.row_splits, tf.int64) - 1
        outputs.append(segment(rows, inverse, sample, num_segments=batch))
    return outputs


def in_range(features: Sequence[ShardFeature]) -> tuple[list[ShardFeature], list[tf.Tensor]]:
    """The features with row 0 in place of wrong ids, and what was wrong: a text each, or "".

    For tables that are whole on this rank while other ranks wait: the lookup must not fail here
    alone.
    """
    legal, problems = [], []
    for feature in features:
        ids, problem = legal_ids(feature.ids, feature.num_rows, feature.table_name)
        legal.append(dataclasses.replace(feature, ids=ids))
        problems.append(problem)
    return legal, problems


def _gather(features, local_rows, training=False, world_size=1):
    """Per feature: distinct rows of its variable, and the positions of its rows in them; or None.

    One gather per variable reads distinct rows, so no index repeats in the variable's gradient:
    Keras 3 squares the values of sparse gradients as they come. Also one text per hash table, empty
    unless it could not insert its keys.
    """
    sharing: dict[int, list[int]] = {}
    places: list[Any] = [None] * len(features)
    problems = []
    for i, feature in enumerate(features):
        if feature.variable is not None:
            sharing.setdefault(id(feature.variable), []).append(i)
    for group in sharing.values():
        first = features[group[0]]
        unique, inverse = tf.unique(tf.concat([local_rows[i] for i in group], 0))
        if is_embedding_variable(first.variable):
            first.variable.record_access()
            # Other ranks wait for the rows, so their message carries what went wrong here.
            table_rows, problem = libraries.ops().sok_find_rows(
                handle=first.variable.handle, keys=unique, dim=first.dim, insert=training
            )
            problems.append(problem)
        else:
            rows = unique // world_size if first.owner == BY_KEY else unique
            table_rows = tf.gather(first.variable, rows)
        sizes = [tf.size(local_rows[i]) for i in group]
        for i, part in zip(group, tf.split(inverse, sizes), strict=True):
            places[i] = table_rows, part
    return places, problems
