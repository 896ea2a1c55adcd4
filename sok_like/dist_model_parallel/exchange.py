"""Lookup in dense tables, on several ranks or on this one, from data-parallel ids.

    ids -> SokRoute =keys=> SokUnpackKeys -> gather -> SokPackRows =rows=> SokCombine -> embeddings
           back:            the variables' gradients <- SokUnpackRows <=gradients=

A feature is an input together with one part of its table: all its rows on one rank (a slice of
columns), or some of its rows on each. All features of a layer travel together: two collectives
forward, one back. Each rank asks for its distinct ids only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like import native
from sok_like.comm import Communicator
from sok_like.dist_model_parallel.embedding_lookup import require_in_range

ALL_RANKS = -1


@dataclasses.dataclass(frozen=True)
class Feature:
    """Ids to look up in one part of a table.

    Attributes:
        ids: int64 `[num_keys]`, flat.
        row_splits: int64 `[batch + 1]`, the samples' first ids; `[0]` of any dtype int64 where
            `combiner` is "none".
        combiner: "sum", "mean", or "none" for one row an id.
        table_name: What errors call the table.
        num_rows: Rows of the whole table.
        dim: Columns of this part.
        owner: The rank that holds it, or `ALL_RANKS` where its rows lie on all of them.
        row_offset: Its first row in the owner's variable.
        variable: This rank's rows; None if it has none.
    """

    ids: tf.Tensor
    row_splits: tf.Tensor
    combiner: str
    table_name: str
    num_rows: int
    dim: int
    owner: int
    row_offset: int
    variable: tf.Variable | None


def lookup(
    features: Sequence[Feature],
    anchor: tf.Variable | None,
    communicator: Communicator,
    name: str,
) -> list[tf.Tensor]:
    """Looks features up wherever their rows are.

    Args:
        features: The same on all ranks, apart from the ids and the variables.
        anchor: `[0, 1]`, on a rank without a trainable variable of its own: what makes its tape
            record the exchange, so that the rank takes part in it backwards.
        name: Names the collectives: the same on all ranks, and no other's at the same time.

    Returns:
        A float32 tensor a feature: `[batch, dim]`, or `[num_keys, dim]` where the combiner is
        "none". The gradient of a row is the sum over the ranks that used it divided by the number
        of ranks: the scale that averaged gradients of replicated variables have.

    Raises:
        tf.errors.InvalidArgumentError: an id outside its table; on every rank, naming the rank it
            happened on.
    """
    ops, world_size = native.ops(), communicator.world_size
    dims = [f.dim for f in features]
    combiners = [f.combiner for f in features]
    row_splits = [f.row_splits for f in features]
    no_weights = [tf.zeros([0])] * len(features)
    with tf.name_scope("exchange"):
        routed = ops.sok_route(
            keys=[f.ids for f in features],
            row_splits=row_splits,
            weights=no_weights,
            world_size=world_size,
            table_names=[f.table_name for f in features],
            dims=dims,
            combiners=combiners,
            max_hotness=[0] * len(features),
            key_limits=[f.num_rows for f in features],
            batch_multiples=[1] * len(features),
            owners=[f.owner for f in features],
            row_offsets=[f.row_offset for f in features],
        )
        message, splits = communicator.all_to_all(routed.message, routed.splits, f"{name}_keys")
        local_rows = ops.sok_unpack_keys(
            message=message, splits=splits, N=len(features), world_size=world_size
        )
        rows, sent = ops.sok_pack_rows(
            rows=_rows_to_send(features, local_rows, anchor),
            message=message,
            splits=splits,
            world_size=world_size,
            dims=dims,
            gradient_scale=1.0 / world_size,
        )
        rows, received = communicator.all_to_all(rows, sent, f"{name}_rows")
        return list(
            ops.sok_combine(
                rows=rows,
                splits=received,
                counts=routed.counts,
                inverse=routed.inverse,
                row_splits=row_splits,
                weights=no_weights,
                dims=dims,
                combiners=combiners,
            )
        )


def lookup_here(features: Sequence[Feature]) -> list[tf.Tensor]:
    """`lookup` in tables that are whole on this rank: no exchange, and in the tables' dtypes."""
    wanted = [require_in_range(f.ids, f.num_rows, f.table_name) + f.row_offset for f in features]
    outputs = []
    for feature, (found, inverse) in zip(features, _gather(features, wanted), strict=True):
        if feature.combiner == "none":
            outputs.append(tf.gather(found, inverse))
            continue
        segment = tf.sparse.segment_sum if feature.combiner == "sum" else tf.sparse.segment_mean
        sample = tf.ragged.row_splits_to_segment_ids(feature.row_splits)
        batch = tf.size(feature.row_splits, tf.int64) - 1
        outputs.append(segment(found, inverse, sample, num_segments=batch))
    return outputs


def _rows_to_send(features, local_rows, anchor):
    """The rows of each feature, float32 `[num_keys, dim]`."""
    rows = [
        tf.zeros([0, feature.dim]) if place is None else tf.cast(tf.gather(*place), tf.float32)
        for feature, place in zip(features, _gather(features, local_rows), strict=True)
    ]
    if anchor is not None:
        nothing = tf.reshape(tf.gather(anchor, tf.zeros([0], tf.int64)), [0, features[0].dim])
        rows[0] = tf.concat([rows[0], tf.cast(nothing, tf.float32)], 0)
    return rows


def _gather(features, local_rows):
    """By feature: distinct rows of its variable, and where in them its rows are; or None.

    One gather a variable, and of distinct rows, so that the variable's gradient has no index twice:
    Keras 3 squares the values of sparse gradients as they come.
    """
    sharing: dict[int, list[int]] = {}
    places: list[Any] = [None] * len(features)
    for i, feature in enumerate(features):
        if feature.variable is not None:
            sharing.setdefault(id(feature.variable), []).append(i)
    for group in sharing.values():
        unique, inverse = tf.unique(tf.concat([local_rows[i] for i in group], 0))
        found = tf.gather(features[group[0]].variable, unique)
        sizes = [tf.size(local_rows[i]) for i in group]
        for i, part in zip(group, tf.split(inverse, sizes), strict=True):
            places[i] = found, part
    return places
