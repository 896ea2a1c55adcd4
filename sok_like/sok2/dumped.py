"""A variable as `dump` and `load` see it: keys, rows and slots of this rank, in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.optimizers.legacy_keras import legacy_name
from sok_like.runtime import comm
from sok_like.saving.format import durable
from sok_like.sok2 import dump_files as files
from sok_like.sok2.distributed_variable import is_static, plain
from sok_like.sok2.dynamic_variable import assign, export
from sok_like.sok2.optimizer import SGD, OptimizerWrapper, static_slot
from sok_like.table.export_assign import held_here
from sok_like.table.variable import is_embedding_variable, unwrap

# Optimizers of tf.compat.v1.train, by Keras' name of the same formula.
_V1 = {"GradientDescent": "SGD", "Momentum": "SGD"}


class Content(NamedTuple):
    """The result of `Dumped.read` for this rank."""

    keys: np.ndarray  # int64 [num_keys]
    rows: np.ndarray  # [num_keys, dim]
    slots: dict[str, np.ndarray]
    iterations: int | None


class Dumped:
    """A variable and the optimizer whose slots are dumped with it."""

    def __init__(self, variable: Any, optimizer: Any):
        variable = plain(variable)
        self._static = is_static(variable)
        if not self._static and not is_embedding_variable(variable):
            raise TypeError(
                "A variable to dump or load must be a sok2.Variable or a sok2.DynamicVariable. "
                f"Received: {variable!r}"
            )
        wrapped = isinstance(optimizer, (OptimizerWrapper, SGD)) or optimizer is None
        if not self._static and not wrapped:
            raise TypeError(
                "`optimizer` must be a sok2.OptimizerWrapper if a DynamicVariable is dumped or "
                f"loaded. Received: {optimizer!r}"
            )
        self._variable, self._optimizer = variable, optimizer
        self.stem = files.stem(variable.name)

    # ---- to files ----

    def parts(self) -> list[tuple[str, bytes, np.ndarray]]:
        """This rank's part of each file: (name, head, items); all ranks have the same files."""
        if self._static:
            keys, rows = self._variable._rows_here(), self._variable.numpy()
        else:
            keys, rows = (tensor.numpy() for tensor in export(self._variable))
        made = [self._part(files.KEY, "", keys), self._part(files.WEIGHT, "", rows)]
        for name in self._slot_names():
            values = self._slot_values(name, keys)
            made.append(self._part(files.SLOT, name, values))
        iterations = self._iterations()
        if iterations is not None:
            mine = [iterations] if comm.current().rank == 0 else []
            made.append(self._part(files.SLOT, files.ITERATIONS, np.array(mine, np.int64)))
        return made

    def _part(self, kind, slot, items):
        name = self._file(kind, slot)
        return name, files.head(self.stem, kind, slot, items.dtype), items

    def _file(self, kind, slot=""):
        optimizer = optimizer_name(self._optimizer) if kind == files.SLOT else ""
        return files.file_name(self.stem, kind, optimizer, slot)

    def _slot_names(self):
        if self._optimizer is None or isinstance(self._optimizer, SGD):
            return []
        if self._static and not isinstance(self._optimizer, OptimizerWrapper):
            with tf.init_scope():
                self._optimizer._create_all_weights([self._variable])
        return list(self._optimizer.get_slot_names())

    def _slot(self, name):
        if isinstance(self._optimizer, OptimizerWrapper):
            return self._optimizer.get_slot(self._variable, name)
        return static_slot(self._optimizer, self._variable, name)

    def _slot_values(self, name, keys):
        slot = self._slot(name)
        if self._static:
            return slot.numpy()
        if is_embedding_variable(slot):  # a row without an update has no slots yet
            return slot.find(keys.view(np.int64) if keys.dtype == np.uint64 else keys)[0].numpy()
        return export(slot)[1].numpy()

    def _iterations(self):
        if self._optimizer is None or isinstance(self._optimizer, SGD):
            return None
        if not self._static and not self._by_rows():
            step = int(self._variable.snapshot().optimizer_step)
            return max(step, 0)
        count = self._optimizer.iterations
        return None if count is None else int(count)

    def _by_rows(self):
        return getattr(self._optimizer, "_rows", None) is not None

    # ---- from files ----

    def read(self, folder: str) -> Content:
        """Reads this rank's part of the files in a folder.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or does not fit the variable.
        """
        dim = self._variable.dim
        keys = files.read(durable.join(folder, self._file(files.KEY)), files.KEY)
        count = len(keys)
        mine = self._mine(keys)
        weights = durable.join(folder, self._file(files.WEIGHT))
        rows = self._rows(weights, files.WEIGHT, count, dim)[mine]
        slots = {
            name: self._rows(self._slot_file(folder, name), files.SLOT, count, dim)[mine]
            for name in self._slot_names()
        }
        kept = keys[mine]
        order = np.argsort(kept) if self._static else slice(None)
        kept = kept.view(np.uint64).view(np.int64) if kept.itemsize == 8 else kept.astype(np.int64)
        slots = {name: values[order] for name, values in slots.items()}
        return Content(kept[order], rows[order], slots, self._read_iterations(folder))

    def _rows(self, path, kind, count, dim):
        rows = files.read(path, kind, dim)
        if len(rows) != count:
            raise ValueError(
                f"{path} must hold {count} rows of {dim} numbers, one for each key. "
                f"Received: {len(rows)} rows of that width (table '{self.stem}')"
            )
        return rows

    def _slot_file(self, folder, name):
        path = durable.join(folder, self._file(files.SLOT, name))
        if not durable.exists(path) and optimizer_name(self._optimizer) == "Adamax":
            # The name that SOK 2.x gives to Adamax' files.
            return durable.join(folder, files.file_name(self.stem, files.SLOT, "Adam", name))
        return path

    def _read_iterations(self, folder):
        if self._iterations() is None:
            return None
        path = durable.join(folder, self._file(files.SLOT, files.ITERATIONS))
        return int(files.read(path, files.SLOT)[0]) if durable.exists(path) else None

    def _mine(self, keys):
        """Positions of the keys that this rank holds."""
        variable = self._variable
        if self._static:
            rows = variable.global_shape[0]
            if not np.array_equal(np.sort(keys).astype(np.int64), np.arange(rows)):
                raise ValueError(
                    f"A dump of variable '{self.stem}' must hold its rows 0 to {rows - 1}. "
                    f"Received: {len(keys)} keys"
                )
            here = np.isin(keys.astype(np.int64), variable._rows_here())
            return np.flatnonzero(here)
        dtype = np.dtype(variable.key_dtype.as_numpy_dtype)
        if not np.array_equal(keys.astype(dtype).astype(keys.dtype), keys):
            raise ValueError(
                f"Table '{self.stem}' has keys of {dtype}. "
                "Received: a dump with keys outside that dtype"
            )
        signed = np.array(keys, np.uint64 if keys.dtype == np.uint64 else np.int64).view(np.int64)
        return np.flatnonzero(held_here(variable, tf.constant(signed)).numpy())

    def check_room(self, content: Content) -> None:
        """Raises ResourceExhaustedError if the tables cannot hold all keys that `read` returned."""
        if self._static:
            return
        slots = [self._slot(name) for name in content.slots] if self._by_rows() else []
        for table in [self._variable, *filter(is_embedding_variable, slots)]:
            _check_room(unwrap(table), content.keys)

    def take(self, content: Content) -> None:
        """Writes the content from `read` into the variable, its slots and the optimizer's step."""
        if self._static:
            self._variable.assign(content.rows)
            for name, values in content.slots.items():
                self._slot(name).assign(values)
            self._take_iterations(content.iterations)
        elif self._by_rows():
            assign(self._variable, content.keys, content.rows)
            for name, values in content.slots.items():
                assign(self._slot(name), content.keys, values)
            self._take_iterations(content.iterations)
        elif content.slots:
            names = [self._optimizer.core_slot(name) for name in content.slots]
            self._variable.load_snapshot(
                keys=content.keys,
                rows=content.rows.astype(np.float32),
                slot_rows=np.concatenate(list(content.slots.values()), 1).astype(np.float32),
                slot_names=np.array([name.encode() for name in names], object),
                slot_widths=np.full(len(names), self._variable.dim, np.int64),
                optimizer_step=-1 if content.iterations is None else content.iterations,
                replace=False,
            )
        else:
            assign(self._variable, content.keys, content.rows)

    def _take_iterations(self, iterations):
        if iterations is not None:
            self._optimizer.iterations.assign(iterations)


def _check_room(table, keys, chunk=2**20):
    stats = table.stats()
    if not stats.max_capacity:
        return
    if table.keeps_records:  # keys that are not in the file may be evicted
        needed = len(keys)
    else:
        parts = (keys[at : at + chunk] for at in range(0, len(keys), chunk))
        found = sum(int(np.count_nonzero(table.find(part)[1])) for part in parts)
        needed = stats.size + len(keys) - found
    if needed > stats.max_capacity:
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"Table '{table.table_name}' holds at most {stats.max_capacity} keys on this rank. "
            f"Received: a dump after which it would hold {needed}",
        )


def optimizer_name(optimizer: Any) -> str:
    """The optimizer's name in files."""
    if isinstance(optimizer, SGD):
        return "SGD"
    stock = optimizer.optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer
    if stock is optimizer and legacy_name(optimizer) is None:
        raise TypeError(
            "`optimizer` must be a sok2.OptimizerWrapper, sok2.SGD or one of "
            f"tf_keras.optimizers.legacy. Received: {optimizer!r}"
        )
    name = type(stock).__name__.removesuffix("Optimizer")
    return _V1.get(name, name)
