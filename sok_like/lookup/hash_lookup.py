"""Looks up keys in a group of tables, on any number of ranks.

    one rank      keys -> [ unique -> find or insert -> combine ] -> embeddings      one op

    N ranks       keys -> route =keys=> gather rows =rows=> combine -> embeddings
                  back:  merge by owner <=gradients= segment sum by key

The whole group needs two collectives forward and one back, whatever the number of tables. All
tables of a group on one device are looked up together; groups are independent of each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from sok_like.lookup import exporting, replicas
from sok_like.lookup.keras_call import check_listed
from sok_like.runtime import ops
from sok_like.runtime.checks import COMBINERS, check_combiner, positions_of
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.native import devices, libraries
from sok_like.runtime.ranks import comm, exchange_order, lookup_options
from sok_like.table.variable import EmbeddingVariable

_recomputed = hooks.Within()


@dataclasses.dataclass(frozen=True)
class HashFeature:
    """Keys to look up in one table."""

    variable: EmbeddingVariable
    keys: tf.Tensor  # int64 `[num_keys]`, flat
    combiner: str = "none"  # "sum", "mean", "sqrtn", or "none" for one row per key
    # int64 `[batch + 1]`, the position of each sample's first key; None if `combiner` is "none".
    row_splits: tf.Tensor | None = None
    # float32 `[num_keys]`, or None for ones.
    weights: tf.Tensor | None = None
    max_hotness: int = 0  # maximum number of keys per sample; 0: no limit
    # The number of samples (of keys, if `combiner` is "none") must be a multiple of this.
    batch_multiple: int = 1
    # The combiner that ranks must agree on, where "none" does the same for this rank's input.
    declared: str | None = None
    # A text, empty unless the input is wrong, which all ranks raise.
    problem: tf.Tensor | None = None

    table_name = property(lambda self: self.variable.table_name)
    dim = property(lambda self: self.variable.dim)
    key_limit = property(lambda self: self.variable.key_limit)

    def legal(self) -> HashFeature:
        """This feature, which raises InvalidArgumentError where it runs if it has a problem."""
        if self.problem is None:
            return self
        of = f"The keys of table '{self.table_name}' have a wrong shape:"
        keys = checked(self.keys, tf.equal(self.problem, ""), of, self.problem)
        return dataclasses.replace(self, keys=keys)


def lookup(
    features: Sequence[HashFeature],
    *,
    training: bool,
    gradient_scale: str = "auto",
    wire_dtype: Any = None,
    name: str = "lookup",
) -> list[tf.Tensor]:
    """Looks up a group of features together; a table may appear more than once.

    Returns one float32 tensor per feature: `[batch, embedding_dim]`, or `[num_keys, embedding_dim]`
    if the combiner is "none". An empty sample gives zeros. `training` inserts missing keys.
    `lookup_options` explains `gradient_scale` and `wire_dtype`. Errors of one rank are raised on
    every rank and name the rank at fault.
    """
    lookup_options.check_gradient_scale(gradient_scale)
    wire_dtype = lookup_options.check_row_dtype(wire_dtype, f"lookup '{name}'")
    if not features:
        return []
    for feature in features:
        check_listed(feature.variable, feature.keys)
    if _recomputed:
        names = ", ".join(repr(feature.variable.table_name) for feature in features)
        raise NotImplementedError(
            "A lookup cannot be computed again for its gradient. Look rows up before "
            "tf.recompute_grad (keras.remat, keras.RematScope), and pass them in. "
            f"Received: a lookup of {names} within it"
        )
    export = exporting.current()
    if export is not None:
        return export.rows(features)
    for table in (feature.variable for feature in features):
        if table.home is not None and comm.current().world_size > 1:
            raise ValueError(
                f"Table '{table.table_name}' has all its keys on rank {table.home} and needs a "
                "lookup of sok_like.sok2. Received: a lookup that asks rank key % world_size"
            )
    outputs: list[tf.Tensor] = [None] * len(features)
    earlier: list[tf.Tensor] = []
    for positions in positions_of(f.variable.device for f in features).values():
        of_device = [features[i] for i in positions]
        part = f"{name}_part{positions[0]}" if earlier else name
        # One group after the other. A group that fails does so on all ranks, and then no rank waits
        # in the collectives of the next group.
        with tf.control_dependencies(earlier):
            earlier = _on_device(of_device, training, gradient_scale, wire_dtype, part)
        for i, rows in zip(positions, earlier, strict=True):
            outputs[i] = rows
    return outputs


def _on_device(features, training, gradient_scale, wire_dtype, name) -> list[tf.Tensor]:
    """`lookup` of features whose tables are on one device."""
    device = features[0].variable.device
    for feature in features:
        feature.variable.record_access()
    with tf.name_scope(name):
        if comm.current().world_size > 1:
            return _exchange(features, training, gradient_scale, wire_dtype, name)
        legal = [feature.legal() for feature in features]
        batch = op_inputs(legal)  # beside its inputs, which may be in host memory
        with devices.device_scope(device):  # its gradient runs there, too
            result = libraries.ops().sok_lookup(
                handles=[f.variable.handle for f in features],
                insert=training,
                keep_rows=ops.rows_to_keep([f.weights for f in features]),
                name="lookup",
                **batch,
            )
            return list(result.embeddings)


def _exchange(features, training, gradient_scale, wire_dtype, name):
    device = features[0].variable.device
    if wire_dtype is not None and "GPU" in device:
        raise NotImplementedError(
            "`wire_dtype` must be None for tables in device memory. Make them within "
            f"tf.device('/CPU:0') to use it. Received: wire_dtype={wire_dtype!r} (lookup "
            f"'{name}' on {device})"
        )
    communicator = comm.current()
    world_size = communicator.world_size

    def gather(message, splits):
        gathered = libraries.ops().sok_gather_rows(
            handles=[f.variable.handle for f in features],
            message=message,
            splits=splits,
            world_size=world_size,
            dims=[f.dim for f in features],
            insert=training,
            gradient_scale=lookup_options.scale_attribute(gradient_scale, world_size),
            name="gather_rows",
        )
        return gathered.rows, gathered.row_splits

    # What ranks must agree on: otherwise rows would be misread, or differ by their owner.
    parts = [f"{f.dim} {f.declared or f.combiner} of {f.variable.initial_rows}" for f in features]
    if [f.table_name for f in features] != [name]:
        parts = [f"{f.table_name} {part}" for f, part in zip(features, parts, strict=True)]
    said = f"{name}: {', '.join(parts)}"
    lookup = exchange_order.Lookup(communicator, name, replicas.comparison(), wire_dtype, said)
    counted = [training and f.variable.counts_occurrences for f in features]
    problems = [f.problem for f in features if f.problem is not None]
    route = {"counted": counted if any(counted) else [], "problems": problems}
    return over_ranks(features, lookup, gather, route, device)


def over_ranks(
    features: Sequence[Any],
    lookup: exchange_order.Lookup,
    gather: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    route: dict[str, Any],
    device: str = "",
) -> list[tf.Tensor]:
    """Route, keys, gather, rows, combine. `gather` answers a message of keys by one of rows."""
    batch, world_size = op_inputs(features), lookup.communicator.world_size
    with devices.device_scope(device):
        routed = libraries.ops().sok_route(
            world_size=world_size, name="route", **{"problems": [], **route}, **batch
        )
    with exchange_order.turn() as done:
        message, splits = exchange_order.exchange_keys(routed.message, routed.splits, lookup)
        with devices.device_scope(device):  # the gradient runs there, too
            rows, row_splits = gather(message, splits)
        rows, received, call = exchange_order.exchange_rows(rows, row_splits, lookup)
        done.append(call)
    with devices.device_scope(device):
        return ops.combine(rows, received, call, routed, batch)


def op_inputs(features: Sequence[Any]) -> dict[str, list]:
    """The inputs of SokLookup and SokRoute for each feature, by their names in these ops."""
    return {
        "keys": [f.keys for f in features],
        "row_splits": _or_empty([f.row_splits for f in features], tf.int64),
        "weights": _or_empty([f.weights for f in features], tf.float32),
        "table_names": [f.table_name for f in features],
        "dims": [f.dim for f in features],
        "combiners": [check_combiner(f.combiner, (*COMBINERS, "none")) for f in features],
        "max_hotness": [f.max_hotness for f in features],
        "key_limits": [f.key_limit for f in features],
        "batch_multiples": [f.batch_multiple for f in features],
    }


def _or_empty(tensors, dtype):
    empty = tf.constant([], dtype)  # eagerly on a GPU, `tf.zeros` would launch a kernel
    return [empty if tensor is None else tf.cast(tensor, dtype) for tensor in tensors]


@hooks.at_init
def _install():
    # A program may decorate functions by `tf.recompute_grad` before `sok.Init`. What it has made of
    # a function is a custom gradient, which TensorFlow calls by one of these two.
    codes: list[Any] = []
    looking = True

    def call(own, f, args, kwargs):
        if looking:
            codes.append(f.__code__)
        if getattr(f, "__code__", None) in codes:
            return _recomputed(own, f, args, kwargs)
        return own(f, args, kwargs)

    for name in ("_eager_mode_decorator", "_graph_mode_decorator"):
        hooks.wrap(custom_gradient, name, call, "lookups within tf.recompute_grad raise")
    with tf.Graph().as_default():
        tf.recompute_grad(tf.identity)(tf.constant(0.0))
    looking = False
