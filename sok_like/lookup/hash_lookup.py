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
from typing import Any

import tensorflow as tf

from sok_like.lookup import exporting, same_weights
from sok_like.lookup.keras_call import check_listed
from sok_like.runtime import callers, comm, devices, native, ops, turns, wire
from sok_like.runtime.checks import COMBINERS, check_combiner
from sok_like.runtime.gradient_scale import check as check_gradient_scale
from sok_like.table.variable import EmbeddingVariable


@dataclasses.dataclass(frozen=True)
class HashFeature:
    """Keys to look up in one table.

    Attributes:
        variable: The table.
        keys: int64 `[num_keys]`, flat.
        combiner: "sum", "mean", "sqrtn", or "none" for one row per key.
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
    wire_dtype: Any = None,
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
        wire_dtype: What rows and gradients are rounded to on their way between ranks: "bfloat16" or
            "float16", which halves what travels, or None (or "float32") for no rounding. The same
            on all ranks. Rows of a rank's own keys are rounded, too, so that results do not depend
            on who owns a key. On one rank nothing travels and nothing is rounded. Tables, optimizer
            state and sums of gradients stay in float32.
        name: Names the group's collectives: the same on all ranks. Tables on several devices are
            looked up one device after the other, each with collectives of its own.

    Returns:
        One float32 tensor per feature, in order: `[batch, embedding_dim]`, or
        `[num_keys, embedding_dim]` where the combiner is "none". An empty sample gives zeros.

    Raises:
        tf.errors.InvalidArgumentError: a sample longer than `max_hotness`; without a hash table, a
            key out of range. On every rank, naming the rank it happened on.
            Or a number that `wire_dtype` cannot hold, such as 70000 in float16.
        tf.errors.ResourceExhaustedError: a table is full. On every rank.
        tf.errors.FailedPreconditionError: ranks differ in `wire_dtype`. On every rank.
        RuntimeError: within a Keras layer none of whose variables is the table.
        NotImplementedError: within `tf.recompute_grad`; on several ranks a `wire_dtype` for tables
            in device memory.
    """
    if not features:
        return []
    check_gradient_scale(gradient_scale)
    wire_dtype = wire.check(wire_dtype, f"lookup '{name}'")
    for feature in features:
        check_listed(feature.variable, feature.keys)
    _check_not_recomputed(features)
    export = exporting.current()
    if export is not None:
        return [export.rows(feature) for feature in features]
    for feature in features:
        _check_home(feature.variable)
    outputs: list[tf.Tensor] = [None] * len(features)
    earlier: list[tf.Tensor] = []
    for device, positions in devices.group_by_device([f.variable.device for f in features]):
        group = _DeviceGroup(
            device,
            [features[i] for i in positions],
            training,
            gradient_scale,
            wire_dtype,
            f"{name}_part{positions[0]}" if earlier else name,
        )
        # One group after the other: where one fails it does so on all ranks, and no rank waits in
        # the collectives of the next.
        with tf.control_dependencies(earlier):
            earlier = group.lookup()
        for i, rows in zip(positions, earlier, strict=True):
            outputs[i] = rows
    return outputs


# TensorFlow's function that runs what is to be computed again for the gradient.
_RECOMPUTED = {"tensorflow.python.ops.custom_gradient": ["inner"]}


def _check_not_recomputed(features):
    if callers.within(_RECOMPUTED):
        names = ", ".join(repr(feature.variable.table_name) for feature in features)
        raise NotImplementedError(
            "A lookup cannot be computed again for its gradient. Look rows up before "
            "tf.recompute_grad (keras.remat, keras.RematScope), and pass them in. "
            f"Received: a lookup of {names} within it"
        )


def _check_home(variable):
    if variable.home is not None and comm.current().world_size > 1:
        raise ValueError(
            f"Table '{variable.table_name}' has all its keys on rank {variable.home}, where "
            "sok_like.sok2's lookups find them. Received: a lookup that asks rank key % world_size"
        )


@dataclasses.dataclass(frozen=True)
class _DeviceGroup:
    """Features whose tables are all on one device; the other fields are `lookup`'s arguments."""

    device: str
    features: list[HashFeature]
    training: bool
    gradient_scale: str
    wire_dtype: str | None
    name: str

    def lookup(self) -> list[tf.Tensor]:
        """The features' rows, in order."""
        communicator = comm.current()
        for feature in self.features:
            feature.variable.record_access()
        with tf.name_scope(self.name):
            if communicator.world_size > 1:
                return self._exchange(communicator)
            with devices.device_scope(self.device):  # where its gradient runs, too
                return ops.lookup_on_one_rank(
                    handles=self._handles(), insert=self.training, name="lookup", **self._batch()
                )

    def _exchange(self, communicator):
        self._check_wire_dtype()
        world_size, batch = communicator.world_size, self._batch()
        counted = [self.training and f.variable.counts_occurrences for f in self.features]
        with devices.device_scope(self.device):
            routed = native.ops().sok_route(
                problems=[],
                world_size=world_size,
                counted=counted if any(counted) else [],
                name="route",
                **batch,
            )
        with turns.turn() as done:
            message, splits = turns.exchange_keys(
                routed.message,
                routed.splits,
                communicator,
                self.name,
                self._said(),
                self.wire_dtype,
            )
            with devices.device_scope(self.device):  # where its gradient runs, too
                rows, sent = ops.gather_rows(
                    self._handles(),
                    message,
                    splits,
                    batch["dims"],
                    world_size=world_size,
                    insert=self.training,
                    scale=self.gradient_scale,
                    name="gather_rows",
                )
            rows, received, call = turns.exchange_rows(
                rows,
                sent,
                communicator,
                f"{self.name}_rows",
                same_weights.compare,
                self.wire_dtype,
            )
            done.append(call)
        with devices.device_scope(self.device):
            return ops.combine(rows, received, call, routed, batch)

    def _check_wire_dtype(self):
        if self.wire_dtype is not None and "GPU" in self.device:
            raise NotImplementedError(
                "`wire_dtype` must be None for tables in device memory. Make them within "
                f"tf.device('/CPU:0') to use it. Received: wire_dtype={self.wire_dtype!r} (lookup "
                f"'{self.name}' on {self.device})"
            )

    def _said(self):
        """What all ranks must say alike: a table or width of another rank's would be misread."""
        tables = [f.variable for f in self.features]
        names = [f"{table.table_name} " for table in tables]
        if names == [f"{self.name} "]:
            names = [""]
        widths = [f"{name}{table.dim}" for name, table in zip(names, tables, strict=True)]
        return f"{self.name}: {', '.join(widths)}"

    def _handles(self):
        return [f.variable.handle for f in self.features]

    def _batch(self):
        """What SokLookup and SokRoute take of each feature, by their names for it."""
        return {
            "keys": [f.keys for f in self.features],
            "row_splits": [_or_empty(f.row_splits, tf.int64) for f in self.features],
            "weights": [_or_empty(f.weights, tf.float32) for f in self.features],
            "table_names": [f.variable.table_name for f in self.features],
            "dims": [f.variable.dim for f in self.features],
            "combiners": [check_combiner(f.combiner, (*COMBINERS, "none")) for f in self.features],
            "max_hotness": [f.max_hotness for f in self.features],
            "key_limits": [f.variable.key_limit for f in self.features],
            "batch_multiples": [f.batch_multiple for f in self.features],
        }


def _or_empty(tensor, dtype):
    return tf.zeros([0], dtype) if tensor is None else tf.cast(tensor, dtype)
