"""An optimizer's slots for rows of tables, and the optimizers that have no fused rule.

fused rule          in the rows of its table: `SlotRows`, for `export` and `assign`
other legacy ones   each slot is a table of its own, trained by the optimizer itself:

table, slot tables --rows of the gradient's keys--> variables [num_keys, dim]
                                                      | the optimizer
table, slot tables <------------------------------- variables
"""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup.local_variables import mark_local
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.sok2.distributed_variable import is_static, own_variable
from sok_like.table.content import TableContent, slot_fields, slots_by_name
from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype
from sok_like.table.variable import EmbeddingVariable


class SlotRows:
    """One of the `slots` of a rule for all keys of this rank; for use outside of graphs."""

    def __init__(self, table: EmbeddingVariable, slot: str, slots: list[str], initial: float):
        self.table, self._slot, self._slots, self._initial = table, slot, slots, initial

    def sok2_export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys `[size]` and float32 values `[size, dim]`, ascending by key."""
        snapshot, slots = self._snapshot()
        values = slots[self._slot]
        values = np.where(np.isnan(values), np.float32(self._initial), values)
        return in_key_dtype(snapshot.keys, self.table), tf.constant(values)

    def sok2_assign(self, keys: Any, values: Any) -> None:
        """Sets values by key; missing keys get a row, and keys of other ranks are ignored."""
        keys = tf.reshape(as_keys(keys), [-1])
        values = as_rows(values, "values", self.table.table_name)
        is_held = held_here(self.table, keys)
        keys, values = (tf.boolean_mask(part, is_held).numpy() for part in (keys, values))
        snapshot, slots = self._snapshot()
        row_of = {key: row for row, key in enumerate(snapshot.keys.numpy().tolist())}
        pairs = [(row, row_of[key]) for row, key in enumerate(keys.tolist()) if key in row_of]
        here, there = np.array(pairs, np.int64).reshape(-1, 2).T

        def at_keys(array, missing):
            rows = np.full([len(keys), array.shape[1]], missing, array.dtype)
            rows[here] = array[there]
            return rows

        slots = {name: at_keys(rows, np.nan) for name, rows in slots.items()}
        rows, records = self.table.find(keys)[0], snapshot.records
        content = TableContent(keys, rows, **slot_fields({**slots, self._slot: values}))
        content.records = None if records is None else at_keys(records.numpy(), 0)
        self.table.load_snapshot(content, replace=False)

    def _snapshot(self):
        """The table's content, and its slots by name."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Slots are exported and assigned eagerly. Received: a call in a graph "
                f"(slot '{self._slot}' of table '{self.table.table_name}')"
            )
        snapshot = self.table.snapshot()
        slots = slots_by_name(snapshot)
        for name in self._slots:  # missing before the first step
            slots.setdefault(name, np.full(snapshot.rows.shape, np.nan, np.float32))
        return snapshot, slots


class RowOptimizer:
    """An optimizer of `tf_keras.optimizers.legacy` that takes (gradient, table) pairs."""

    def __init__(self, optimizer: Any):
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise NotImplementedError(
                f"In a graph of tf.compat.v1, tables do not support {type(optimizer).__name__}; "
                "they support SGD and Adam of Keras, and the optimizers of tf.compat.v1.train"
            )
        self._optimizer = optimizer
        with tf.init_scope():  # the slots of a variable of one element
            weights = list(optimizer._weights)
            probe = tf.Variable([0.0], trainable=False)
            optimizer._create_slots([probe])
            slots = optimizer._slots.pop(probe._unique_id, {})
            optimizer._weights = weights
            # The initial value of each slot, by name.
            self.initial = {name: float(slot[0]) for name, slot in slots.items()}
        # By `id` of a table: itself and the tables of its slots, each with a variable [None, dim].
        self._tables: dict[int, list[tuple[EmbeddingVariable, tf.Variable]]] = {}

    def slots(self, table: EmbeddingVariable) -> dict[str, EmbeddingVariable]:
        """The tables that hold the slots of a table, by name."""
        held = [held for held, _ in self._with_slots(table)]
        return dict(zip(self.initial, held[1:], strict=True))

    def _with_slots(self, table):
        if id(table) in self._tables:
            return self._tables[id(table)]
        held = [table]
        for name, initial in self.initial.items():
            slot = EmbeddingVariable(
                table.dim,
                name=f"{table.table_name}_{name}",
                key_dtype=table.key_dtype,
                initializer=tf.keras.initializers.Constant(initial),
                trainable=False,
            )
            slot.home = table.home
            held.append(slot)
        with tf.init_scope():
            nothing = tf.zeros([0, table.dim])
            copies = [tf.Variable(nothing, shape=[None, table.dim], trainable=False) for _ in held]
        self._tables[id(table)] = list(zip(held, map(mark_local, copies), strict=True))
        return self._tables[id(table)]

    def apply_gradients(self, pairs: list[tuple[Any, Any]]) -> Any:
        """Updates all variables; gradients of tables are tf.IndexedSlices of keys."""
        stock, read = [], []
        for gradient, variable in pairs:
            rule = f"A wrapper of {type(self._optimizer).__name__} trains variables of sok2"
            variable = own_variable(variable, f"{rule} (see filter_variables)")
            if is_static(variable):
                stock.append((gradient, variable))
            else:
                keys, rows_gradient = self._read(gradient, variable)
                stock.append((rows_gradient, self._with_slots(variable)[0][1]))
                read.append((variable, keys))
        update = self._optimizer.apply_gradients(stock, experimental_aggregate_gradients=False)
        write = libraries.ops().sok_table_assign
        with tf.control_dependencies([update]):
            written = [
                write(handle=held.handle, keys=keys, rows=copy.read_value())
                for table, keys in read
                for held, copy in self._with_slots(table)
            ]
            return tf.group(*[op for op in written if op is not None])

    def _read(self, gradient, table):
        """Copies the rows of the gradient's keys; returns the keys and the copy's gradient."""
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                "The gradient of a DynamicVariable must be tf.IndexedSlices of keys. "
                f"Received: {gradient!r} (table '{table.table_name}')"
            )
        values = as_rows(gradient.values, "values", table.table_name)
        summed = comm.distinct(tf.IndexedSlices(values, as_keys(gradient.indices)))
        (_, copy), *slots = self._with_slots(table)
        for held, its_copy in self._with_slots(table):
            its_copy.assign(held.find(summed.indices)[0])
        slots_of_copy = self._optimizer._slots.setdefault(copy._unique_id, {})
        slots_of_copy |= dict(zip(self.initial, (slot for _, slot in slots), strict=True))
        positions = tf.range(tf.size(summed.indices))
        return summed.indices, tf.IndexedSlices(summed.values, positions)
