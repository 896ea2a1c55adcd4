"""A slot of a fused rule, stored in the rows of its table, for `export` and `assign`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype
from sok_like.table.variable import EmbeddingVariable


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
