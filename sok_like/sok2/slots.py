"""An optimizer's slots for rows of tables, and the optimizers that have no fused rule.

fused rule          in the rows of its table: `SlotRows`, for `export` and `assign`
other legacy ones   each slot is a table of its own, trained by the optimizer itself:

table, slot tables --rows of the gradient's keys--> variables [num_keys, dim]
                                                      | the optimizer
table, slot tables <------------------------------- variables
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup.local_marks import mark_local
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.sok2.distributed_variable import is_static, plain
from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable


class SlotRows:
    """The values of one slot for all keys of this rank; for use outside of graphs.

    `slots` are the core's names of all slots of the rule: an optimizer takes them together only.
    """

    def __init__(self, table: EmbeddingVariable, slot: str, slots: list[str], initial: float):
        self.table, self._slot, self._slots, self._initial = table, slot, slots, initial

    def sok2_export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys `[size]` and float32 values `[size, dim]`, ascending by key."""
        content = _SlotSnapshot(self.table, self._slot, self._slots)
        values = np.where(np.isnan(content.values), np.float32(self._initial), content.values)
        return in_key_dtype(tf.constant(content.keys), self.table), tf.constant(values)

    def sok2_assign(self, keys: Any, values: Any) -> None:
        """Sets values by key; missing keys get a row, and keys of other ranks are ignored."""
        keys = tf.reshape(as_keys(keys), [-1])
        values = as_rows(values, "values", self.table.table_name)
        mine = held_here(self.table, keys)
        keys, values = tf.boolean_mask(keys, mine), tf.boolean_mask(values, mine)
        _SlotSnapshot(self.table, self._slot, self._slots).write(keys.numpy(), values.numpy())


class _SlotSnapshot:
    """A snapshot of a table in NumPy."""

    def __init__(self, table, slot, slots):
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Slots are exported and assigned eagerly. Received: a call in a graph "
                f"(slot '{slot}' of table '{table.table_name}')"
            )
        self._table = table
        self._snapshot = table.snapshot()
        self.keys = self._snapshot.keys.numpy()
        self._slot_rows = self._snapshot.slot_rows.numpy()
        self._names = [name.decode() for name in self._snapshot.slot_names.numpy()]
        self._widths = self._snapshot.slot_widths.numpy().tolist()
        if slot not in self._names:  # before the first step
            missing = [name for name in slots if name not in self._names]
            nothing = np.full([len(self.keys), len(missing) * table.dim], np.nan, np.float32)
            self._slot_rows = np.concatenate([self._slot_rows, nothing], 1)
            self._names += missing
            self._widths += [table.dim] * len(missing)
        index = self._names.index(slot)
        first = sum(self._widths[:index])
        self._columns = slice(first, first + self._widths[index])
        self.values = self._slot_rows[:, self._columns]

    def write(self, keys, values):
        present = {key: row for row, key in enumerate(self.keys.tolist())}
        slot_rows = np.full([len(keys), self._slot_rows.shape[1]], np.nan, np.float32)
        at = [(row, present[key]) for row, key in enumerate(keys.tolist()) if key in present]
        here, there = np.array(at, np.int64).reshape(-1, 2).T
        slot_rows[here] = self._slot_rows[there]
        slot_rows[:, self._columns] = values
        records = None
        if self._table.keeps_records:
            records = np.zeros([len(keys), 3], np.int64)
            records[here] = self._snapshot.records.numpy()[there]
        self._table.load_snapshot(
            keys=keys,
            rows=self._table.find(keys)[0],
            slot_rows=slot_rows,
            slot_names=np.array([name.encode() for name in self._names], object),
            slot_widths=np.array(self._widths, np.int64),
            records=records,
            replace=False,
        )


class RowOptimizer:
    """An optimizer of `tf_keras.optimizers.legacy` that takes (gradient, table) pairs."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._initial = _initial_slots(optimizer)
        # By `id` of a table: (the table, its slots), and variables [None, dim].
        self._slots: dict[int, tuple[EmbeddingVariable, dict[str, EmbeddingVariable]]] = {}
        self._copies: dict[int, tf.Variable] = {}

    @property
    def slot_names(self) -> list[str]:
        """Names of the optimizer's slots."""
        return list(self._initial)

    def slot(self, table: EmbeddingVariable, name: str) -> EmbeddingVariable:
        """The table that holds a slot."""
        return self._slots_of(table)[name]

    def apply_gradients(self, pairs: list[tuple[Any, Any]]) -> Any:
        """Updates all variables; gradients of tables are tf.IndexedSlices of keys."""
        stock, tables = [], []
        for gradient, variable in ((g, plain(v)) for g, v in pairs):
            if is_embedding_variable(variable):
                tables.append(self._read(gradient, variable))
                stock.append(tables[-1][1:3])
            elif is_static(variable):
                stock.append((gradient, variable))
            else:
                raise TypeError(
                    f"This wrapper of {type(self._optimizer).__name__} trains variables of sok2 "
                    f"(see filter_variables). Received: {variable!r}"
                )
        update = self._optimizer.apply_gradients(stock, experimental_aggregate_gradients=False)
        with tf.control_dependencies([] if tf.executing_eagerly() else [update]):
            written = [
                libraries.ops().sok_table_assign(
                    handle=held.handle, keys=keys, rows=copy.read_value()
                )
                for keys, _, _, copies in tables
                for held, copy in copies
            ]
            return tf.group(*[op for op in written if op is not None])

    def _read(self, gradient, table):
        """Keys, the copy's gradient, the copy, and all (table, copy) pairs."""
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                "The gradient of a DynamicVariable must be tf.IndexedSlices of keys. "
                f"Received: {gradient!r} (table '{table.table_name}')"
            )
        values = as_rows(gradient.values, "values", table.table_name)
        summed = comm.distinct(tf.IndexedSlices(values, as_keys(gradient.indices)))
        keys = summed.indices
        copies = [(held, self._copy(held)) for held in (table, *self._slots_of(table).values())]
        for held, copy in copies:
            copy.assign(held.find(keys)[0])
        copy = copies[0][1]
        slots_of_copy = self._optimizer._slots.setdefault(copy._unique_id, {})
        slots_of_copy |= dict(zip(self._initial, (slot for _, slot in copies[1:]), strict=True))
        positions = tf.range(tf.size(keys))
        return keys, tf.IndexedSlices(summed.values, positions), copy, copies

    def _slots_of(self, table):
        if id(table) not in self._slots:
            slots = {}
            for name, initial in self._initial.items():
                slots[name] = EmbeddingVariable(
                    table.dim,
                    name=f"{table.table_name}_{name}",
                    key_dtype=table.key_dtype,
                    initializer=tf.keras.initializers.Constant(initial),
                    trainable=False,
                )
                slots[name].home = table.home
            self._slots[id(table)] = table, slots
        return self._slots[id(table)][1]

    def _copy(self, held):
        if id(held) not in self._copies:
            with tf.init_scope():
                copy = tf.Variable(tf.zeros([0, held.dim]), shape=[None, held.dim], trainable=False)
            self._copies[id(held)] = mark_local(copy)
        return self._copies[id(held)]


def _initial_slots(optimizer):
    """The initial value of each slot, found with a variable of one element."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            f"In a graph of tf.compat.v1, tables do not support {type(optimizer).__name__}; they "
            "support SGD and Adam of Keras, and the optimizers of tf.compat.v1.train"
        )
    with tf.init_scope():
        weights = list(optimizer._weights)
        probe = tf.Variable([0.0], trainable=False)
        optimizer._create_slots([probe])
        slots = optimizer._slots.pop(probe._unique_id, {})
        optimizer._weights = weights
        return {name: float(slot[0]) for name, slot in slots.items()}
