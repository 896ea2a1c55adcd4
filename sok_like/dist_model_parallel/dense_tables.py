"""The dense tables of a distributed layer, for files and for exports.

checkpoints, Keras' files    `DenseTables`: this rank's slices, with the optimizer's slots
SavedModels                  whole tables, looked up by TensorFlow's own ops (`export_outputs`)
"""

import contextlib
import re
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import exchange
from sok_like.lookup.dense_lookup import as_tf_table, require_in_range
from sok_like.lookup.exporting import combined
from sok_like.lookup.local_variables import is_local
from sok_like.planner.tables import DATA_PARALLEL, HASHED, Shard
from sok_like.runtime.checks import unmet
from sok_like.runtime.framework import hooks
from sok_like.saving.parts import table_names
from sok_like.saving.parts.dense_tables import DenseSlice, register
from sok_like.table.slices import HeldSlice, TableSlice

hooks.open_door(hooks.DENSE_TABLES)


class DenseTables(tf.__internal__.tracking.Trackable):
    """All dense tables of a layer, see `sok_like/saving/parts/dense_tables.py`."""

    def __init__(self, layer: Any):
        self._layer = weakref.ref(layer)
        self.name, self.id = layer.name, secrets.token_hex(8)
        self.table_name = f"dense_{layer.name}"  # names the folder beside a file
        register(self)

    def _serialize_to_tensors(self):
        return {"id": tf.constant(self.id)}

    def _restore_from_tensors(self, restored_tensors):
        # Eagerly, `sok_like.saving.containers.checkpoints` reads the tables that the id stands for.
        raise NotImplementedError(
            "tf.train.Checkpoint restores dense tables of dist_model_parallel eagerly only. "
            f"Received: a restore in a graph of layer '{self.name}'"
        )

    def dense_parts(self, optimizers: Sequence[Any]) -> list[DenseSlice]:
        """The parts of this rank, with their slot variables in these optimizers."""
        layer: Any = self._layer()
        layer.build()
        parts, here = [], layer.shards_here()
        for key, table in self.tables().items():
            if table.table_id not in here:
                continue
            shard, of_shard = here[table.table_id]
            variable = of_shard.weights[0]
            # All ranks have the whole of a replicated table.
            written = layer.rank == 0 or shard.kind != DATA_PARALLEL
            slots = {f"{key}.{k}": slot for k, slot in _slots(variable, optimizers).items()}
            for part, of_part in {key: variable, **slots}.items():
                shape = table.input_dim, table.output_dim
                parts.append(DenseSlice(part, shape, held_slice(shard, of_part), written))
        return parts

    def tables(self) -> dict[str, Any]:
        layer: Any = self._layer()
        plan = layer.strategy.plan
        dense = [table for table in plan.tables if plan.kinds[table.table_id] != HASHED]
        names = []
        for config in (table.config for table in dense):
            # The name of an embedding; that of a table without one if Keras has made it.
            name, class_name = config.get("name"), getattr(config["layer_type"], "__name__", "")
            of_keras = re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()
            has_none = not name or re.fullmatch(rf"{of_keras}(_\d+)?", name)
            names.append("embedding" if has_none else name)
        named = zip(table_names.within(layer.name, names), dense, strict=True)
        return {table_names.key_of(name, table.table_id): table for name, table in named}

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {key: (table.input_dim, table.output_dim) for key, table in self.tables().items()}

    def own_variables(self) -> list[Any]:
        """This rank's variables that are not hash tables, as optimizers know them."""
        layer = self._layer()
        if layer is None:
            return []
        layers = (*layer.dp_layers, *layer.local_embedding_layers, *layer.row_layers)
        anchors = [] if layer._anchor is None else [layer._anchor]
        return [held.weights[0] for held in layers if held.weights] + anchors

    def variables_in(self, optimizer: Any) -> list[Any]:
        """The layer's variables that an optimizer knows, and their slot variables."""
        variables = []
        for variable in self.own_variables():
            slots = slot_objects(optimizer, variable)
            if slots is not None:
                variables += [variable, *slots.values()]
        return variables


def held_slice(shard: Shard, variable: Any) -> HeldSlice:
    """A rank's slice of a dense table, in this variable of its layer."""
    begin, end = (shard.row_start, shard.column_start), (shard.row_stop, shard.column_stop)
    return HeldSlice(TableSlice(begin, end), as_tf_table(variable), shard.first_row)


def _slots(variable, optimizers):
    """Slot variables by name, from the only optimizer that has any."""
    by_optimizer: dict[int, dict[str, Any]] = {}
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", None) or optimizer
        if hasattr(inner, "get_slot_names"):
            slots = {}
            for name in inner.get_slot_names():
                with contextlib.suppress(KeyError):  # it has no such slot for this variable
                    slots[name] = inner.get_slot(as_tf_table(variable), name)
            slots = {name: slot for name, slot in slots.items() if slot is not None}
        else:
            slots = slot_objects(inner, variable) or {}
        if slots:
            by_optimizer[id(inner)] = slots
    if len(by_optimizer) > 1:
        required = "have one optimizer with slot variables of a dense table"
        received = f"{len(by_optimizer)} for '{variable.name}'"
        raise unmet("A checkpoint", required, received, error=NotImplementedError)
    return next(iter(by_optimizer.values()), {})


def refuse_shards(layer: Any) -> None:
    """Makes TensorFlow's and Keras' own exports of this rank's shards raise."""
    text = (
        f"This rank's shard of layer '{layer.name}' cannot be part of a SavedModel, which would "
        "hold no whole table. `sok.export_saved_model(model, path)`, called by all ranks, writes "
        "one with whole tables. Received: an export to a SavedModel (model.export, "
        "tf.saved_model.save)"
    )

    def refuse(*args, **kwargs):
        raise NotImplementedError(text)

    for held in (*layer.local_embedding_layers, *layer.row_layers):
        for weight in held.weights:
            variable = getattr(weight, "_value", weight)  # inside a variable of Keras 3
            if variable is not None:  # Keras has created it
                variable._export_to_saved_model_graph = refuse


def export_outputs(
    layer: Any, inputs: list[Any], whole: dict[str, Any], variables: Any
) -> list[Any]:
    """The outputs for data-parallel inputs, without an exchange; `whole` stands for shards."""
    if not layer.dp_input:
        raise ValueError(
            f"Layer '{layer.name}' has dp_input=False on {layer.world_size} ranks: each rank takes "
            "its own inputs, so no single process can take them all and it cannot be exported. Put "
            "its weights (`get_weights`, `set_weights`) into a layer with dp_input=True."
        )
    outputs = []
    for i, table_id in enumerate(layer.strategy.plan.input_table_map):
        samples, table = layer.flatten(i, inputs[i]), layer._tables_of_inputs[i]
        variable = whole.get(f"table_{table_id}")
        if variable is not None:
            checked = require_in_range(samples.ids, table.num_rows, table.name)
            rows = tf.cast(tf.gather(variable, checked), tf.float32)
            rows = combined(rows, samples.combiner, samples.row_splits)
        else:
            feature = layer.feature(table, samples, variables)
            (rows,) = exchange.lookup_here([feature], training=False)
        outputs.append(samples.restore(rows))
    return outputs


def slot_objects(optimizer: Any, variable: Any) -> dict[str, Any] | None:
    """An optimizer's slots of a variable, of its shape, by name; None if it does not know it."""
    optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    places = getattr(optimizer, "_index_dict", None)  # tf_keras; Keras 3 has the attribute below
    if places is None:
        places = getattr(optimizer, "_trainable_variables_indices", None)
    key = optimizer._var_key(variable) if places else None
    if not places or key not in places:
        return None
    found = {}
    for attribute, items in vars(optimizer).items():
        is_listed = isinstance(items, (list, tuple)) and len(items) == len(places)
        item: Any = items[places[key]] if is_listed and not attribute.startswith("_sok") else None
        if attribute == "_variables" or item is variable or not hasattr(item, "shape"):
            continue
        if tuple(item.shape) == tuple(variable.shape):
            found[attribute.strip("_")] = item
        elif is_local(variable):
            raise NotImplementedError(
                "Slot variables of the sharded tables of dist_model_parallel must have the tables' "
                f"shapes. Received: {type(optimizer).__name__}, whose {attribute} of "
                f"'{variable.name}' has the shape {tuple(item.shape)}"
            )
    return found
