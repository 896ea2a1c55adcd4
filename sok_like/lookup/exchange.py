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

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import hash_lookup as hash_lookup
from sok_like.lookup import replicas
from sok_like.lookup.dense_lookup import combined, legal_ids, require_in_range
from sok_like.runtime.checks import positions_of
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.variable import is_embedding_variable

# Values of `owner`, also for the ops: rows on all ranks, and keys of a hash table.
ALL_RANKS, BY_KEY = -1, -2


@dataclasses.dataclass(frozen=True)
class ShardFeature:
    """Ids to look up in one shard of a table."""

    keys: tf.Tensor  # int64 [num_keys], flat
    # int64 [batch + 1], the position of each sample's first key; not read if `combiner` is "none".
    row_splits: tf.Tensor | None
    combiner: str  # "sum", "mean", or "none" for one row per key; hash tables also have "sqrtn"
    table_name: str  # in errors
    # Number of rows of the whole table. 0 for a hash table by key, where every key is legal. A hash
    # table on one rank takes keys in `[0, key_limit)`, see `most_ids`.
    key_limit: int
    dim: int  # columns of this shard
    # The rank that holds it. `ALL_RANKS`: each rank holds a contiguous range of rows. `BY_KEY`:
    # rank `key % world_size` holds it; in a dense table as its row `key // world_size`.
    owner: int
    row_offset: int  # its first row in the owner's variable
    variable: Any  # this rank's rows: a tf.Variable, an EmbeddingVariable, or None
    weights: tf.Tensor | None = None  # floats [num_keys]; None: ones

    max_hotness, batch_multiple = 0, 1  # no limits


def most_ids(world_size: int) -> int:
    """`key_limit` of a hash table that one rank holds: ids travel as `id * world_size + owner`."""
    return min(2**63 - 1, 2**64 // world_size - 1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the features of one lookup travel."""

    name: str  # of the collectives; the same on all ranks, and used by no other at the same time
    training: bool = True  # whether hash tables insert missing keys, or give their initial rows
    # `[0, 1]`, on a rank that has no trainable variable: it makes the rank's tape record the
    # exchange, so that the rank takes part in its gradient.
    anchor: tf.Variable | None = None
    # Factor of the gradients. None: 1 / number of ranks, as in averages over replicated variables.
    gradient_scale: float | None = None
    wire_dtype: str | None = None  # as in `hash_lookup.lookup`; the same on all ranks


def exchange_lookup(
    features: Sequence[ShardFeature], how: Exchange, problems: Sequence[tf.Tensor] = ()
) -> list[tf.Tensor]:
    """Looks features up wherever their rows are; every rank raises what goes wrong on one."""
    # `problems` are texts, empty unless something went wrong on this rank. Features are the same on
    # all ranks, except for keys and variables. A row's gradient is the sum over ranks, scaled.
    communicator = comm.current()
    world_size = communicator.world_size
    # What ranks must agree on: otherwise rows of another table or place would be misread.
    shards = []
    for f in features:
        shard = f"{f.key_limit}x{f.dim} of {f.owner} at {f.row_offset} {f.combiner}"
        if f.owner == BY_KEY and is_embedding_variable(f.variable):  # how its rows begin
            shard += f" of {f.variable.initial_rows}"
        shards.append(shard)
    said = f"{how.name}: {', '.join(shards)}"
    lookup = exchange_order.Lookup(
        communicator, how.name, replicas.comparison(), how.wire_dtype, said
    )
    owners, dims = [f.owner for f in features], [f.dim for f in features]

    def gather(message, splits):
        ops = libraries.ops()
        local_rows = ops.sok_unpack_keys(
            message=message, splits=splits, N=len(features), world_size=world_size, owners=owners
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
        return ops.sok_pack_rows(
            rows=to_send,
            message=message,
            splits=splits,
            problems=full_tables,
            world_size=world_size,
            dims=dims,
            gradient_scale=1.0 / world_size if how.gradient_scale is None else how.gradient_scale,
        )

    row_offsets = [f.row_offset for f in features]
    route = {"problems": list(problems), "owners": owners, "row_offsets": row_offsets}
    with tf.name_scope("exchange"):
        return hash_lookup.over_ranks(features, lookup, gather, route)


def feature_here(
    table: Any, name: str, samples: tuple[Any, Any, Any], combiner: str = "none"
) -> ShardFeature:
    """The feature of a hash table, or of a dense table as if it were whole on this rank."""
    # `samples` are those of `ids.KeySamples`.
    keys, splits, weights = samples
    if is_embedding_variable(table):
        limit, dim, owner = table.key_limit, table.dim, BY_KEY
        weights = None if weights is None else tf.cast(weights, tf.float32)
    else:  # arithmetic is in the table's dtype
        (limit, dim), owner = table.shape.as_list(), ALL_RANKS
        limit = tf.shape(table, tf.int64)[0] if limit is None else limit
    splits = None if splits is None else tf.cast(splits, tf.int64)
    return ShardFeature(keys, splits, combiner, name, limit, dim, owner, 0, table, weights)


def lookup_here(
    features: Sequence[ShardFeature],
    training: bool = True,
    name: str = "lookup",
    gradient_scale: str = "sum",
    wire_dtype: Any = None,
) -> list[tf.Tensor]:
    """Looks up dense tables that are whole on this rank, and hash tables; in the tables' dtypes."""
    hashed = [
        hash_lookup.HashFeature(f.variable, f.keys, f.combiner, f.row_splits, f.weights)
        for f in features
        if is_embedding_variable(f.variable)
    ]
    scales = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype}
    by_key = iter(hash_lookup.lookup(hashed, training=training, name=name, **scales))
    dense = [f for f in features if not is_embedding_variable(f.variable)]
    numbers = [require_in_range(f.keys, f.key_limit, f.table_name) + f.row_offset for f in dense]
    places, _ = _gather(dense, numbers)
    of_dense = (
        combined(rows, inverse, f.combiner, f.row_splits, f.weights)
        for f, (rows, inverse) in zip(dense, places, strict=True)
    )
    return [next(by_key if is_embedding_variable(f.variable) else of_dense) for f in features]


def in_range(features: Sequence[ShardFeature]) -> tuple[list[ShardFeature], list[tf.Tensor]]:
    """The features with row 0 for wrong ids, and a text each, as one rank must not fail alone."""
    legal, problems = [], []
    for feature in features:
        keys, problem = legal_ids(feature.keys, feature.key_limit, feature.table_name)
        legal.append(dataclasses.replace(feature, keys=keys))
        problems.append(problem)
    return legal, problems


def _gather(features, local_rows, training=False, world_size=1):
    """Per feature distinct rows of its variable and the positions of its rows in them, or None."""
    # No index repeats in a variable's gradient: Keras 3 squares the values of sparse ones as they
    # come. Also one text per hash table, empty unless it could not insert its keys.
    places: list[Any] = [None] * len(features)
    problems = []
    for group in positions_of(id(feature.variable) for feature in features).values():
        first = features[group[0]]
        if first.variable is None:
            continue
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
