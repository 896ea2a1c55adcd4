"""The dense tables of a distributed layer, as seen by `tf.train.Checkpoint` and Keras' files."""

from __future__ import annotations

import contextlib
import re
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.optimizer_state import slot_objects
from sok_like.dist_model_parallel.weights import slice_of
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.planner.tables import DATA_PARALLEL, HASHED
from sok_like.runtime.framework import hooks
from sok_like.saving.parts import optimizer_variables, table_names
from sok_like.saving.parts.dense_tables import DenseSlice
from sok_like.table.slices import HeldSlice

hooks.open_door(hooks.DENSE_TABLES)


class DenseTables(tf.__internal__.tracking.Trackable):
    """All dense tables of a layer, see `sok_like/saving/parts/dense_tables.py`."""

    def __init__(self, layer: Any):
        self._layer = weakref.ref(layer)
        self.name, self.id = layer.name, secrets.token_hex(8)
        self.table_name = f"dense_{layer.name}"  # names the folder beside a file
        optimizer_variables.register(self)

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
        parts = []
        plan, here = layer._held()
        keys = {table.table_id: key for key, table in self.tables().items()}
        for table_id, (weight, first_row) in here.items():
            if plan.kinds[table_id] == HASHED:
                continue
            table, shard = plan.tables[table_id], plan.shard(table_id, layer.rank)
            shape = table.input_dim, table.output_dim
            # All ranks have the whole of a replicated table.
            written = layer.rank == 0 or plan.kinds[table_id] != DATA_PARALLEL
            found = {keys[table_id]: as_tf_table(weight)}
            slots = _slots(weight, optimizers)
            found |= {f"{keys[table_id]}.{name}": slot for name, slot in slots.items()}
            for key, variable in found.items():
                held = HeldSlice(slice_of(shard), variable, first_row)
                parts.append(DenseSlice(key, shape, held, written))
        return parts

    def tables(self) -> dict[str, Any]:
        """The dense tables of the plan, by key."""
        layer: Any = self._layer()
        plan = layer.strategy.plan
        found = [table for table in plan.tables if plan.kinds[table.table_id] != HASHED]
        names = table_names.within(layer.name, [_name(table.config) for table in found])
        named = zip(names, found, strict=True)
        return {table_names.key_of(name, table.table_id): table for name, table in named}

    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the dense tables, by key."""
        return {key: (table.input_dim, table.output_dim) for key, table in self.tables().items()}

    def own_variables(self) -> list[Any]:
        """This rank's variables that are not hash tables, as optimizers know them."""
        layer = self._layer()
        if layer is None:
            return []
        layers = (*layer.dp_layers, *layer.local_embedding_layers, *layer.row_layers)
        anchors = [] if layer._anchor is None else [layer._anchor]
        return [each.weights[0] for each in layers if each.weights] + anchors

    def variables_in(self, optimizer: Any) -> list[Any]:
        """The layer's variables that an optimizer knows, and their slot variables."""
        found = []
        for variable in self.own_variables():
            slots = slot_objects(optimizer, variable)
            if slots is not None:
                found += [variable, *slots.values()]
        return found


def _name(config):
    """The name of an embedding; that of a table without one if Keras has made it."""
    name, layer_type = config.get("name"), config["layer_type"]
    made = re.sub(r"(?<!^)(?=[A-Z])", "_", getattr(layer_type, "__name__", "")).lower()
    return "embedding" if not name or re.fullmatch(rf"{made}(_\d+)?", name) else name


def _slots(variable, optimizers):
    """Slot variables by name, from the only optimizer that has any."""
    found: dict[int, dict[str, Any]] = {}
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
            slots = {name: as_tf_table(slot) for name, slot in slots.items()}
        if slots:
            found[id(inner)] = slots
    if len(found) > 1:
        raise NotImplementedError(
            "A checkpoint must have one optimizer with slot variables of a dense table. "
            f"Received: {len(found)} for '{variable.name}'"
        )
    return next(iter(found.values()), {})
