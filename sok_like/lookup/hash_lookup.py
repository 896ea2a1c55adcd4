"""Lookup: keys of a group of tables to embeddings, on any number of ranks.

    one rank      keys -> [ unique -> find or insert -> combine ] -> embeddings      one op

    N ranks       keys -> route =keys=> gather rows =rows=> combine -> embeddings
                  back:  merge by owner <=gradients= segment sum by key

Two collectives forward and one back for the whole group, whatever the number of tables. All tables
of a group are looked up together, if they are on one device; groups are independent of each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from sok_like.lookup.keras_call import check_listed
from sok_like.runtime import comm, devices, native, ops, turns
from sok_like.runtime.checks import COMBINERS, check_combiner
from sok_like.runtime.gradient_scale import check as check_gradient_scale
from sok_like.table.variable import EmbeddingVariable


@dataclasses.dataclass(frozen=True)
class HashFeature:
    """Keys to look up in one table.

    Attributes:
        variable: The table.
        keys: int64 `[num_keys]`, flat.
        combiner: "sum", "mean", "sqrtn", or "none" for one row a key.
        row_splits: int64 `[batch + 1]`, the samples' first keys; None where `combiner` is "none".
        weights: float32 `[num_keys]` or None for ones. A constant to the gradient.
        max_hotness: Most keys a sample may hold; 0 for no bound.
        batch_multiple: What the number of samples (of keys, where `combiner` is "none") must be a
            multiple of.
    """

    variable: EmbeddingVariable
    keys: tf.Tensor
    combiner: str = "none"
    row_splits: tf.Tensor | None = None
    weights: tf.Tensor | None = None
    max_hotness: int = 0
    batch_multiple: int = 1


def lookup(
    features: Sequence[HashFeature],
    *,
    training: bool,
    gradient_scale: str = "auto",
    name: str = "lookup",
) -> list[tf.Tensor]:
    """Looks up a group of features in one go.

    Args:
        features: What to look up; a table may appear more than once.
        training: True inserts missing keys with their initial row. False reads the initial row and
            inserts nothing.
        gradient_scale: The gradient of a row is the sum over the ranks that used it ("sum", right
            where the loss was divided by the global batch) or that sum divided by the number of
            ranks ("mean", right where each rank's loss is a mean over its own batch). "auto" is
            "mean" within Keras' `fit`; elsewhere it is "sum", with a warning on several ranks.
        name: Names the group's collectives: the same on all ranks. Tables on several devices are
            looked up in parts, a device after the other, each with collectives of its own.

    Returns:
        A float32 tensor a feature, in order: `[batch, embedding_dim]`, or
        `[num_keys, embedding_dim]` where the combiner is "none". An empty sample gives zeros.

    Raises:
        tf.errors.InvalidArgumentError: a sample longer than `max_hotness`; without a hash table, a
            key out of range. On every rank, naming the rank it happened on.
        tf.errors.ResourceExhaustedError: a table is full. On every rank.
        RuntimeError: within a Keras layer none of whose variables is the table.
    """
    if not features:
        return []
    check_gradient_scale(gradient_scale)
    for feature in features:
        check_listed(feature.variable, feature.keys)
    outputs: list[tf.Tensor] = [None] * len(features)
    earlier: list[tf.Tensor] = []
    for device, positions in devices.group_by_device([f.variable.device for f in features]):
        # One part after the other: where one fails it does so on all ranks, and no rank waits in
        # the collectives of the next.
        with tf.control_dependencies(earlier):
            found = _lookup_on(
                device,
                [features[i] for i in positions],
                training,
                gradient_scale,
                f"{name}_part{positions[0]}" if earlier else name,
            )
        earlier = found
        for i, rows in zip(positions, found, strict=True):
            outputs[i] = rows
    return outputs


def _lookup_on(device, features, training, gradient_scale, name):
    """`lookup` of features of which all tables are on one device."""
    communicator = comm.current()
    attributes = ops.FeatureAttributes(
        table_names=[f.variable.table_name for f in features],
        dims=[f.variable.dim for f in features],
        combiners=[check_combiner(f.combiner, (*COMBINERS, "none")) for f in features],
        max_hotness=[f.max_hotness for f in features],
        key_limits=[f.variable.key_limit for f in features],
        batch_multiples=[f.batch_multiple for f in features],
    )
    for feature in features:
        feature.variable.record_access()
    handles = [f.variable.handle for f in features]
    keys = [f.keys for f in features]
    row_splits = [_or_empty(f.row_splits, tf.int64) for f in features]
    weights = [_or_empty(f.weights, tf.float32) for f in features]
    with tf.name_scope(name):
        if communicator.world_size == 1:
            with devices.device_scope(device):  # for the sake of its gradient
                return ops.lookup_on_one_rank(
                    handles, keys, row_splits, weights, attributes, insert=training, name="lookup"
                )
        return _exchange(
            *(communicator, device, handles, keys, row_splits, weights, attributes),
            *(training, gradient_scale, name),
        )


def _exchange(
    communicator, device, handles, keys, row_splits, weights, attributes, training, scale, name
):
    world_size = communicator.world_size
    with devices.device_scope(device):
        routed = native.ops().sok_route(
            keys=keys,
            row_splits=row_splits,
            weights=weights,
            problems=[],
            world_size=world_size,
            name="route",
            **attributes._asdict(),
        )
    with turns.turn() as done:
        message, splits = turns.exchange_keys(routed.message, routed.splits, communicator, name)
        with devices.device_scope(device):  # for the sake of its gradient
            rows, sent = ops.gather_rows(
                handles,
                message,
                splits,
                attributes.dims,
                world_size=world_size,
                insert=training,
                scale=scale,
                name="gather_rows",
            )
        rows, received, call = turns.exchange_rows(rows, sent, communicator, f"{name}_rows")
        done.append(call)
    with devices.device_scope(device):
        return list(
            native.ops().sok_combine(
                rows=rows,
                splits=received,
                counts=routed.counts,
                inverse=routed.inverse,
                row_splits=row_splits,
                weights=weights,
                call=call,
                dims=attributes.dims,
                combiners=attributes.combiners,
                name="combine",
            )
        )


def _or_empty(tensor, dtype):
    return tf.zeros([0], dtype) if tensor is None else tf.cast(tensor, dtype)
