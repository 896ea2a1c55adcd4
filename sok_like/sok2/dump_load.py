"""`dump` and `load` of SOK 2.x, on any number of ranks.

Each rank writes its part of every file; rank 0 publishes the files when all parts are there. On the
way back each rank keeps the keys it holds, so a dump of 4 ranks can be loaded on 1, 3 or 64. An
error on one rank raises on all ranks. A load then leaves all variables unchanged; after a dump each
table has its earlier files or its new ones.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.saving.format import durable
from sok_like.saving.format.part_file import write_part
from sok_like.sok2 import dump_files as files
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
    folder, communicator = os.fspath(path), comm.current()
    dumped = _dumped("dump", dump_vars, optimizer)
    parts: list[tuple[str, bytes, np.ndarray, str]] = []  # name of a file, head, items, table

    def count():
        parts.extend((*part, table.stem) for table in dumped for part in table.parts())
        durable.make_folder(folder)
        return {"dump": f"{secrets.randbits(62):016x}", "counts": [len(part[2]) for part in parts]}

    statuses = agreed(count, communicator, f"sok2.dump of {[table.stem for table in dumped]}")
    totals = np.sum([status["counts"] for status in statuses], 0)
    before = np.sum([status["counts"] for status in statuses[: communicator.rank]], 0)
    aside = [durable.join(folder, f"{name}.{statuses[0]['dump']}.tmp") for name, *_ in parts]
    # Several ranks write into one file, if the file system can do that; otherwise rank 0 joins
    # their files.
    is_local = durable.local(folder) is not None
    ranks = range(communicator.world_size)

    def write():
        firsts = np.broadcast_to(before, len(parts)).tolist()
        for file, first, (_, head, items, table) in zip(aside, firsts, parts, strict=True):
            begin = head if communicator.rank == 0 else b""
            if is_local:
                position = files.HEAD + int(first) * items[:1].nbytes
                write_part(file, items, position, table, begin)
            else:
                data = np.ascontiguousarray(items, items.dtype.newbyteorder("<"))
                durable.write(f"{file}.{communicator.rank}", begin + data.tobytes())

    def publish():
        if communicator.rank > 0:
            return
        for file, total, (name, _, items, _) in zip(aside, totals.tolist(), parts, strict=True):
            row = int(np.prod(items.shape[1:], dtype=np.int64)) * items.itemsize
            wanted = files.HEAD + total * row
            written = [file] if is_local else [f"{file}.{rank}" for rank in ranks]
            size = sum(durable.size(part) for part in written)
            if size != wanted:
                raise ValueError(
                    f"{folder} must be a folder that all ranks share. Received: {size} bytes of "
                    f"{wanted} in {name}"
                )
            if not is_local:
                with durable.written(file) as joined:
                    for part in written:
                        joined.write(durable.read(part))
        tables = zip(aside, parts, strict=True)
        for _, files_of_table in itertools.groupby(tables, lambda pair: pair[1][3]):
            pairs = [(file, durable.join(folder, name)) for file, (name, *_) in files_of_table]
            durable.rename_all(pairs[::-1])  # the keys come last
        remove(ranks)

    def remove(of_ranks):
        for file in aside:
            durable.remove(file)
            for rank in () if is_local else of_ranks:
                durable.remove(f"{file}.{rank}")

    def undone(function: Callable) -> None:
        try:
            agreed(function, communicator, "sok2.dump")
        except BaseException:
            remove([communicator.rank])
            raise

    undone(write)
    undone(publish)


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
    folder, communicator = os.fspath(path), comm.current()
    dumped = _dumped("load", load_vars, optimizer)
    call = f"sok2.load of {[table.stem for table in dumped]}"
    contents: list[Any] = []

    def read():
        contents.extend(table.read(folder) for table in dumped)
        for table, content in zip(dumped, contents, strict=True):
            table.check_room(content.keys)

    def take():
        for number, (table, content) in enumerate(zip(dumped, contents, strict=True)):
            try:
                table.take(content)
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                loaded = [before.stem for before in dumped[:number]]
                raise tf.errors.ResourceExhaustedError(
                    None,
                    None,
                    f"{getattr(error, 'message', error)}. Loaded before it on this rank: {loaded}; "
                    f"possibly loaded in part: '{table.stem}'; other ranks may have loaded all",
                ) from error

    agreed(read, communicator, call)
    agreed(take, communicator, call)


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
