"""A distributed layer in a SavedModel: whole tables, looked up by TensorFlow's own ops."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from sok_like.lookup import exchange
from sok_like.lookup.dense_lookup import require_in_range
from sok_like.lookup.exporting import Spread, combined, refuse_saved_model
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.planner.tables import DATA_PARALLEL

_SHARD = (
    "This rank's shard of layer '{name}' cannot be part of a SavedModel, which would hold no whole "
    "table. `sok.export_saved_model(model, path)`, called by all ranks, writes one with whole "
    "tables. Received: an export to a SavedModel (model.export, tf.saved_model.save)"
)


def refuse_shards(layer: Any) -> None:
    """Makes TensorFlow's and Keras' own exports of this rank's shards raise."""
    for held in (*layer.local_embedding_layers, *layer.row_layers):
        for weight in held.weights:
            refuse_saved_model(weight, _SHARD.format(name=layer.name))


def spread_tables(layer: Any) -> dict[str, Spread]:
    """The sharded dense tables, as `table_<id>`."""
    dense, kinds = layer.dense_in_files, layer.strategy.plan.kinds
    ids = {key: table.table_id for key, table in dense.tables().items()}
    ids = {key: table_id for key, table_id in ids.items() if kinds[table_id] != DATA_PARALLEL}
    found = {_key(table_id): Spread(dense.shapes()[key]) for key, table_id in ids.items()}
    for part in dense.dense_parts(()):
        if part.key in ids:
            held, place = part.held, part.held.place
            read = functools.partial(_read, held)
            dtype = held.variable.dtype.base_dtype
            found[_key(ids[part.key])] = Spread(
                part.shape, dtype, place.begin, place.shape[0], read
            )
    return found


def _read(held, start, stop):
    first = held.place.begin[0]
    return held.read(held.place.rows(first + start, first + stop))


def outputs(layer: Any, inputs: list[Any], whole: dict[str, Any], tables: Any) -> list[Any]:
    """The layer's outputs for data-parallel inputs, without an exchange.

    `whole` has the variables that stand for `spread_tables`, and `tables` those of this rank.
    """
    if not layer.dp_input:
        raise ValueError(
            f"Layer '{layer.name}' has dp_input=False on {layer.world_size} ranks: each rank takes "
            "its own inputs, so no single process can take them all and it cannot be exported. Put "
            "its weights (`get_weights`, `set_weights`) into a layer with dp_input=True."
        )
    plan, found = layer.strategy.plan, []
    for i, ids in enumerate(inputs):
        table_id = plan.input_table_map[i]
        samples = layer.flatten(i, ids)
        if _key(table_id) in whole:
            table = whole[_key(table_id)]
            checked = require_in_range(samples.ids, table.shape[0], layer._names[table_id])
            rows = tf.cast(tf.gather(table, checked), tf.float32)
            rows = combined(rows, samples.combiner, samples.row_splits)
        else:
            shard = layer.shard_of(table_id, exchange.ALL_RANKS)
            feature = layer.feature(table_id, shard, samples, tables)
            if plan.kinds[table_id] == DATA_PARALLEL:
                (rows,) = exchange.lookup_here([feature], training=False)
            else:
                of_samples = samples.ids, samples.combiner, samples.row_splits
                (rows,) = lookup([HashFeature(feature.variable, *of_samples)], training=False)
        found.append(samples.restore(rows))
    return found


def _key(table_id):
    return f"table_{table_id}"
