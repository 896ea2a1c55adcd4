"""`dump` and `load` of SOK 2.x, on any number of ranks: each writes its part of every file.

An error on one rank raises on all ranks. A load then leaves all variables unchanged; after a dump
each table has its earlier files or its new ones.
"""

import os
import string
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.optimizers.rules import legacy_name
from sok_like.runtime.checks import as_list, unmet, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import Steps
from sok_like.saving import transaction
from sok_like.saving.format import durable
from sok_like.saving.parts.checkpointable import StagedContent
from sok_like.saving.parts.sok_files import JoinedFile, JoinedFiles
from sok_like.saving.transaction import Saving
from sok_like.sok2 import dump_files as files
from sok_like.sok2.distributed_variable import is_static, own_variable
from sok_like.sok2.dynamic_variable import assign, export
from sok_like.sok2.training import SGD, OptimizerWrapper, static_slot
from sok_like.table.content import TableContent, slot_fields
from sok_like.table.keys import held_here
from sok_like.table.policies import ScoreEvict


def dump(path: str | os.PathLike, dump_vars: Any, optimizer: Any = None) -> None:
    """Writes tables and the optimizer's slots of their rows into files of SOK 2.x's format.

    Every rank must call it, with a folder that all ranks share. Slots that an earlier dump in the
    folder has of these tables, and this one has not, are removed.

    Args:
        path: Folder, on any file system that TensorFlow writes; created if it is missing.
        dump_vars: A variable of this package or a list of them; files have the variables' names.
        optimizer: None, an OptimizerWrapper or SGD, or, if all tables are of `Variable`, one of
            `tf_keras.optimizers.legacy`; or a list with one of these.

    Raises:
        TypeError: a variable or the optimizer is of another kind.
        ValueError: two variables have the same name, or there are several optimizers.
        RuntimeError: in a graph; a rank could not write; the folder is not shared.
    """
    dumped = _dumped("dump", dump_vars, optimizer)
    stems = [table.stem for table in dumped]

    def find():
        return os.fspath(path), [file for table in dumped for file in table.joined_files()]

    part = JoinedFiles("files of sok2.dump", find, lambda folder: files.slot_files(folder, stems))
    Saving(Steps(f"sok2.dump of {stems}", own_error=True), [part]).run()


def load(path: str | os.PathLike, load_vars: Any, optimizer: Any = None) -> None:
    """Reads what `dump` wrote, here or in SOK 2.x, on any number of ranks; every rank must call it.

    Keys of a DynamicVariable that are not in the files are unchanged.

    Args:
        path: Folder.
        load_vars, optimizer: As in `dump`. The names must be those that were dumped.

    Raises:
        TypeError, ValueError: As in `dump`.
        RuntimeError: in a graph; or a file is missing, damaged, or does not fit the variable.
        tf.errors.ResourceExhaustedError: a table cannot hold all keys. These errors change no
            variable. If memory runs out while rows are written, the error names the variables that
            were loaded.
    """
    dumped = _dumped("load", load_vars, optimizer)
    stems = [table.stem for table in dumped]
    contents: list[tuple] = []

    def read():
        contents.extend(table.read(os.fspath(path)) for table in dumped)
        for table, (keys, *_) in zip(dumped, contents, strict=True):
            table.check_room(keys)
        transaction.prepare(StagedContent(commit, may_fail=True))

    def commit():
        for number, (table, content) in enumerate(zip(dumped, contents, strict=True)):
            try:
                table.take(*content)
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                text = (
                    f"{getattr(error, 'message', error)}. Loaded before it on this rank: "
                    f"{stems[:number]}; possibly loaded in part: '{table.stem}'; other ranks may "
                    "have loaded all"
                )
                raise tf.errors.ResourceExhaustedError(None, None, text) from error

    transaction.load(f"sok2.load of {stems}", None, read)


def incremental_model_dump(sok_vars: Any, time_threshold: Any, sess: Any = None) -> Any:
    """Raises, and names another way: a table knows the step of a key's last lookup, not its time.

    Args:
        sok_vars, time_threshold, sess: As in SOK 2.x; unused.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "incremental_model_dump selects keys by time, but tables record steps. After `rows = "
        "variable.export()` of a DynamicVariable of var_type 'hybrid', the rows that training has "
        "looked up since step s are those with `rows.versions >= s`. "
        f"Received: time_threshold={time_threshold!r}"
    )


def _dumped(call, variables, optimizer):
    """Each variable with the optimizer whose slots belong to it."""
    if not tf.executing_eagerly():
        raise RuntimeError(f"sok2.{call} must be called eagerly. Received: a call in a graph")
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) > 1:
            raise ValueError(f"`optimizer` must be one optimizer. Received: {len(optimizer)}")
        optimizer = optimizer[0] if optimizer else None
    is_of_sok2 = optimizer is None or isinstance(optimizer, (OptimizerWrapper, SGD))
    if not is_of_sok2 and legacy_name(optimizer) is None:
        required = "a sok2.OptimizerWrapper, sok2.SGD or one of tf_keras.optimizers.legacy"
        raise wrong_argument("optimizer", required, optimizer, error=TypeError)
    dumped: list[Dumped] = []
    for variable in as_list(variables):
        variable = own_variable(variable, "A variable to dump or load must be one of sok2")
        if not is_static(variable) and not is_of_sok2:
            required = "a sok2.OptimizerWrapper if a DynamicVariable is dumped or loaded"
            raise wrong_argument("optimizer", required, optimizer, error=TypeError)
        with_slots = None if isinstance(optimizer, SGD) else optimizer
        dumped.append((_Static if is_static(variable) else _Dynamic)(variable, with_slots))
    names = [table.stem for table in dumped]
    if len(set(names)) < len(names):
        raise ValueError(f"Variables must have different names. Received: {names}")
    return dumped


class Dumped:
    """This rank's keys, rows and slots of a variable, in NumPy; each kind has a subclass."""

    _content: Any  # this rank's keys and rows
    _slot_rows: Any  # the values of a slot, in the order of these keys
    _positions: Any  # of this rank's keys among the int64 ones of a file, ascending
    take: Any  # writes what `read` returned

    def __init__(self, variable: Any, optimizer: Any):
        self._variable, self._optimizer = variable, optimizer
        # The name as it appears in names of files.
        self.stem = variable.name.translate({ord(sign): "_" for sign in string.punctuation})
        self._slot_names = [] if optimizer is None else list(optimizer.get_slot_names())

    def joined_files(self) -> list[JoinedFile]:
        """This rank's part of each file; all ranks have the same files."""
        keys, rows = self._content()
        arrays = [(files.KEY, "", keys), (files.WEIGHT, "", rows)]
        arrays += [(files.SLOT, name, self._slot_rows(name, keys)) for name in self._slot_names]
        iterations = self._iterations()
        if iterations is not None:
            count = np.array([iterations] if comm.current().rank == 0 else [], np.int64)
            arrays.append((files.SLOT, files.ITERATIONS, count))
        joined = []
        for kind, slot, items in arrays:
            head = files.head(self.stem, kind, slot, items.dtype)
            item = len(items), items.itemsize * int(np.prod(items.shape[1:], dtype=np.int64))
            joined.append(JoinedFile(self._file(kind, slot), self.stem, head, *item, [items]))
        return joined

    def _file(self, kind, slot=""):
        """A file's name; it has that of the optimizer, of Keras' for the same formula."""
        stock = getattr(self._optimizer, "optimizer", self._optimizer)
        name = type(stock).__name__.removesuffix("Optimizer")
        name = "SGD" if name in ("GradientDescent", "Momentum") else name
        return f"{self.stem}{('-key', '-weight', f'-{name}-{slot}')[kind]}"

    def _slot(self, name):
        if isinstance(self._optimizer, OptimizerWrapper):
            return self._optimizer.get_slot(self._variable, name)
        return static_slot(self._optimizer, self._variable, name)

    def _iterations(self):
        count = None if self._optimizer is None else self._optimizer.iterations
        return None if count is None else int(count)

    def check_room(self, keys: np.ndarray) -> None:
        """Raises ResourceExhaustedError if the tables cannot hold all of these keys."""

    def read(self, folder: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], int | None]:
        """This rank's int64 keys, rows, slots and iterations; raises if a file does not fit."""
        keys = files.read_integers(durable.join(folder, self._file(files.KEY)), files.KEY)
        here, shape = self._positions(keys), (len(keys), self._variable.dim)
        path = durable.join(folder, self._file(files.WEIGHT))
        rows, slots = files.read_rows(path, files.WEIGHT, shape, here), {}
        for name in self._slot_names:
            file = self._file(files.SLOT, name)
            if not durable.exists(durable.join(folder, file)):  # as SOK 2.x names Adamax' files
                file = file.replace("-Adamax-", "-Adam-")
            path = durable.join(folder, file)
            slots[name] = files.read_rows(path, files.SLOT, shape, here)
        iterations = self._iterations()
        if iterations is not None:
            path = durable.join(folder, self._file(files.SLOT, files.ITERATIONS))
            is_there = durable.exists(path)
            iterations = int(files.read_integers(path, files.SLOT)[0]) if is_there else None
        return keys[here], rows, slots, iterations


class _Static(Dumped):
    """A `Variable`; its optimizer is stock, or a wrapper of one."""

    def __init__(self, variable: Any, optimizer: Any):
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            with tf.init_scope():
                optimizer._create_all_weights([variable])
        super().__init__(variable, optimizer)

    def _content(self):
        return self._variable._rows_here(), self._variable.numpy()

    def _slot_rows(self, name, keys):
        return self._slot(name).numpy()

    def _positions(self, keys):
        rows = self._variable.global_shape[0]
        if not np.array_equal(np.sort(keys), np.arange(rows)):
            required = f"hold its rows 0 to {rows - 1}"
            raise unmet(f"A dump of variable '{self.stem}'", required, f"{len(keys)} keys")
        return np.flatnonzero(np.isin(keys, self._variable._rows_here()))

    def take(self, keys, rows, slots, iterations):
        order = np.argsort(keys)
        self._variable.assign(rows[order])
        for name, values in slots.items():
            self._slot(name).assign(values[order])
        if iterations is not None:
            self._optimizer.iterations.assign(iterations)


class _Dynamic(Dumped):
    """A `DynamicVariable`; slots are in its rows, or in tables of their own (`RowOptimizer`)."""

    def __init__(self, variable: Any, optimizer: Any):
        super().__init__(variable, optimizer)
        self._has_slot_tables = getattr(optimizer, "_rows", None) is not None

    def _content(self):
        return tuple(tensor.numpy() for tensor in export(self._variable))

    def _slot_rows(self, name, keys):
        slot = self._slot(name)
        if self._has_slot_tables:  # a row without an update has no slots yet
            return slot.find(keys)[0].numpy()
        return export(slot)[1].numpy()

    def _iterations(self):
        if self._optimizer is None or self._has_slot_tables:
            return super()._iterations()
        return max(int(self._variable.snapshot().optimizer_step), 0)

    def _positions(self, keys):
        dtype = np.dtype(self._variable.key_dtype.as_numpy_dtype)
        if not np.array_equal(keys.astype(dtype).astype(np.int64), keys):
            raise ValueError(
                f"Table '{self.stem}' has keys of {dtype}. "
                "Received: a dump with keys outside that dtype"
            )
        return np.flatnonzero(held_here(self._variable, tf.constant(keys)).numpy())

    def take(self, keys, rows, slots, iterations):
        if slots and not self._has_slot_tables:
            core_names = self._optimizer.core_slots
            fields = slot_fields({core_names[name]: values for name, values in slots.items()})
            table = TableContent(keys, rows.astype(np.float32), **fields)
            if iterations is not None:
                table.optimizer_step = iterations
            self._variable.load_snapshot(table, replace=False)
            return
        assign(self._variable, keys, rows)
        for name, values in slots.items():
            assign(self._slot(name), keys, values)
        if self._has_slot_tables and iterations is not None:
            self._optimizer.iterations.assign(iterations)

    def check_room(self, keys: np.ndarray) -> None:
        slots = map(self._slot, self._slot_names) if self._has_slot_tables else ()
        for table in (self._variable, *slots):
            stats, option = table.stats(), table.options["ev_option"]
            evicts = any(isinstance(e, ScoreEvict) for e in option.evictions) if option else False
            if not stats.max_capacity or evicts:
                continue
            parts = np.array_split(keys, -(-len(keys) // 2**20) or 1)
            present = sum(int(np.count_nonzero(table.find(part)[1])) for part in parts)
            needed = len(keys) + stats.size - present
            if needed > stats.max_capacity:
                raise tf.errors.ResourceExhaustedError(
                    None,
                    None,
                    f"Table '{table.table_name}' holds at most {stats.max_capacity} keys on this "
                    f"rank. Received: a dump after which it would hold {needed}",
                )
