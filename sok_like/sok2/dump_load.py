"""`dump` and `load` of SOK 2.x, on any number of ranks.

Each rank writes its part of every file; rank 0 publishes the files when all parts are there. On the
way back each rank keeps the keys it holds, so a dump of 4 ranks can be loaded on 1, 3 or 64. An
error on one rank raises on all ranks. A load then leaves all variables unchanged; after a dump each
table has its earlier files or its new ones.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks.graph_collectives import Steps
from sok_like.saving import transaction
from sok_like.saving.parts.checkpointable import StagedContent
from sok_like.saving.parts.joined_files import JoinedFile, JoinedFiles
from sok_like.saving.transaction import Saving
from sok_like.sok2.dumped import dumped_of, optimizer_name


def dump(path: str | os.PathLike, dump_vars: Any, optimizer: Any = None) -> None:
    """Writes tables and the optimizer's slots of their rows into files of SOK 2.x's format.

    Every rank must call it, with a folder that all ranks share.

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
    steps = Steps(f"sok2.dump of {[table.stem for table in dumped]}")
    Saving(steps, [_Files(os.fspath(path), dumped)]).run()


class _Files(JoinedFiles):
    """The files of all variables of a dump, as a part."""

    def __init__(self, folder, dumped):
        super().__init__("files of sok2.dump", folder)
        self._dumped = dumped

    def files(self):
        found = []
        for table in self._dumped:
            for name, head, items in table.parts():
                item_bytes = items.itemsize * int(np.prod(items.shape[1:], dtype=np.int64))
                found.append(JoinedFile(name, table.stem, head, len(items), item_bytes, [items]))
        return found


def load(path: str | os.PathLike, load_vars: Any, optimizer: Any = None) -> None:
    """Reads what `dump` wrote, here or in SOK 2.x, on any number of ranks; every rank must call it.

    Keys of a DynamicVariable that are not in the files are unchanged.

    Args:
        path: Folder.
        load_vars, optimizer: As in `dump`. The names must be those that were dumped.

    Raises:
        TypeError: a variable or the optimizer is of another kind.
        ValueError: two variables have the same name, or there are several optimizers.
        RuntimeError: in a graph; or a file is missing, damaged, or does not fit the variable.
        tf.errors.ResourceExhaustedError: a table cannot hold all keys. These errors change no
            variable. If memory runs out while rows are written, the error names the variables that
            were loaded.
    """
    folder, dumped = os.fspath(path), _dumped("load", load_vars, optimizer)
    call = f"sok2.load of {[table.stem for table in dumped]}"
    transaction.load(call, None, lambda: transaction.prepare(_Contents(folder, dumped)))


class _Contents(StagedContent):
    """What the files have of all variables of a load."""

    may_fail = True

    def __init__(self, folder, dumped):
        self._dumped, self._contents = dumped, [table.read(folder) for table in dumped]
        for table, content in zip(dumped, self._contents, strict=True):
            table.check_room(content.keys)

    def commit(self):
        for number, (table, content) in enumerate(zip(self._dumped, self._contents, strict=True)):
            try:
                table.take(content)
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                loaded = [before.stem for before in self._dumped[:number]]
                raise tf.errors.ResourceExhaustedError(
                    None,
                    None,
                    f"{getattr(error, 'message', error)}. Loaded before it on this rank: {loaded}; "
                    f"possibly loaded in part: '{table.stem}'; other ranks may have loaded all",
                ) from error


def _dumped(call, variables, optimizer):
    if not tf.executing_eagerly():
        raise RuntimeError(f"sok2.{call} must be called eagerly. Received: a call in a graph")
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) > 1:
            raise ValueError(f"`optimizer` must be one optimizer. Received: {len(optimizer)}")
        optimizer = optimizer[0] if optimizer else None
    variables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    if optimizer is not None:
        optimizer_name(optimizer)  # raises if it is of another kind
    dumped = [dumped_of(variable, optimizer) for variable in variables]
    names = [table.stem for table in dumped]
    if len(set(names)) < len(names):
        raise ValueError(f"Variables must have different names. Received: {names}")
    return dumped
