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
from sok_like.runtime.checks import unmet
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
            of = f"slot '{self._slot}' of table '{self.table.table_name}'"
            required, received = "be exported and assigned eagerly", "a call in a graph"
            raise unmet("Slots", required, received, of, RuntimeError)
        snapshot = self.table.snapshot()
        slots = slots_by_name(snapshot)
        for name in self._slots:  # missing before the first step
            slots.setdefault(name, np.full(snapshot.rows.shape, np.nan, np.float32))
        return snapshot, slots


_ROWS = ""  # in place of the name of a slot: the rows of the table itself


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
        self._tables: dict[int, dict[str, tuple[EmbeddingVariable, tf.Variable]]] = {}  # by `id`

    def with_slots(self, table: EmbeddingVariable) -> dict[str, Any]:
        """A table, by `_ROWS`, and its slots' by name, each with a variable `[None, dim]`."""
        if id(table) in self._tables:
            return self._tables[id(table)]
        tables = {_ROWS: table}
        for name, initial in self.initial.items():
            tables[name] = EmbeddingVariable(
                table.dim,
                name=f"{table.table_name}_{name}",
                key_dtype=table.key_dtype,
                initializer=tf.keras.initializers.Constant(initial),
                trainable=False,
            )
            tables[name].home = table.home
        with tf.init_scope():
            nothing = tf.zeros([0, table.dim])
            copies = [
                tf.Variable(nothing, shape=[None, table.dim], trainable=False) for _ in tables
            ]
        pairs = zip(tables.values(), map(mark_local, copies), strict=True)
        self._tables[id(table)] = dict(zip(tables, pairs, strict=True))
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
                stock.append((rows_gradient, self.with_slots(variable)[_ROWS][1]))
                read.append((variable, keys))
        update = self._optimizer.apply_gradients(stock, experimental_aggregate_gradients=False)
        write = libraries.ops().sok_table_assign
        with tf.control_dependencies([update]):
            written = [
                write(handle=held.handle, keys=keys, rows=copy.read_value())
                for table, keys in read
                for held, copy in self.with_slots(table).values()
            ]
            return tf.group(*[op for op in written if op is not None])

    def _read(self, gradient, table):
        """Copies the rows of the gradient's keys; returns the keys and the copy's gradient."""
        if not isinstance(gradient, tf.IndexedSlices):
            subject, of = "The gradient of a DynamicVariable", f"table '{table.table_name}'"
            raise unmet(subject, "be tf.IndexedSlices of keys", f"{gradient!r}", of, TypeError)
        values = as_rows(gradient.values, "values", table.table_name)
        summed = comm.distinct(tf.IndexedSlices(values, as_keys(gradient.indices)))
        with_slots = self.with_slots(table)
        for held, copy in with_slots.values():
            copy.assign(held.find(summed.indices)[0])
        slots_of_copy = self._optimizer._slots.setdefault(with_slots[_ROWS][1]._unique_id, {})
        slots_of_copy |= {name: with_slots[name][1] for name in self.initial}
        positions = tf.range(tf.size(summed.indices))
        return summed.indices, tf.IndexedSlices(summed.values, positions)
