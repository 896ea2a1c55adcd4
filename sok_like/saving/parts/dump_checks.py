"""What dumps and restores of tables share: who may write where, and the errors that say so."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import require, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import local_size
from sok_like.saving.format import checksums, durable, in_use, manifest
from sok_like.table.variable import as_embedding_variable

# Dumps in the background that are neither finished nor given up.
running: weakref.WeakSet = weakref.WeakSet()
# The tables that wrote or read the dump in a folder, by folder and table name.
_known_by: dict[tuple[str, str], list[weakref.ref]] = {}


def checked(variable: Any) -> Any:
    """The EmbeddingVariable; raises for anything else, and for one that only `sok2.dump` takes."""
    variable = as_embedding_variable(variable, "embedding_variable")
    if variable.home is not None and comm.current().world_size > 1:
        raise ValueError(
            "`embedding_variable` must have its keys on rank key % world_size. Received: table "
            f"'{variable.table_name}', all on rank {variable.home}; use sok_like.sok2.dump"
        )
    return variable


def ready(variable: Any, filepath: Any, **flags: Any) -> Any:
    """The table of a Saver's method, which writes nothing else now; checks its other arguments."""
    variable = checked(variable)
    of = f"table '{variable.table_name}'"
    if not isinstance(filepath, (str, os.PathLike)) or isinstance(os.fspath(filepath), bytes):
        required = "a folder, as a str or an os.PathLike"
        raise wrong_argument("filepath", required, filepath, of, TypeError)
    required = "a folder; '.' is the working directory"
    require(filepath != "", "filepath", required, filepath, of)
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_argument(name, "True or False", value, of, TypeError)
    finish_running(variable)
    return variable


def _place(folder, table):
    local = durable.local(folder)
    return os.path.normpath(folder) if local is None else os.path.realpath(local), table


def mark_writer(folder: str, variable: Any) -> None:
    """Makes a table the dump's only owner, and locks the folder as long as there is the table."""
    with contextlib.suppress(RuntimeError):  # two jobs at once; the next dump of one raises
        _lock(folder, variable)
    _known_by[_place(folder, variable.table_name)] = [weakref.ref(variable)]


def mark_reader(folder: str, variable: Any) -> None:
    """Adds a table to the dump's owners."""
    _known_by.setdefault(_place(folder, variable.table_name), []).append(weakref.ref(variable))


def _lock(folder, variable):
    if comm.current().rank == 0:
        locks = variable.__dict__.setdefault("_locked_folders", set())
        locks.add(in_use.lock(folder, "filepath"))


def check_owner(folder: str, variable: Any) -> None:
    """Raises ValueError if a dump would replace that of another table of this program.

    Also if nothing can be written there, because there is no file system for the folder's scheme.
    RuntimeError if another job dumps into the folder.
    """
    if durable.exists(folder) and durable.is_folder(folder):
        _lock(folder, variable)
    known = [ref() for ref in _known_by.get(_place(folder, variable.table_name), [])]
    alive = [table for table in known if table is not None]
    if alive and all(table is not variable for table in alive):
        raise ValueError(
            "Tables that are dumped into one folder must have different names. Received: two "
            f"tables '{variable.table_name}' for {folder!r}; dump one of them into another folder"
        )


def same_dump(told: Sequence[Any]) -> None:
    """Raises RuntimeError unless all ranks report the same `dump`."""
    if len({message["dump"] for message in told}) > 1:
        raise RuntimeError(
            "All ranks must read the same dump, from a folder that they share. Received: different "
            "dumps"
        )


def see_shards(folder: str, entries: Sequence[Any]) -> None:
    """Raises unless the folder shows all shards of a dump; called before the manifest names them.

    Rank 0 looks for all of them. Every shard is read back by one rank that did not write it, on
    another host if there are several: each rank reads about as much as it wrote. Entries are None
    where there was nothing to write.
    """
    rank, world_size = comm.current().rank, comm.current().world_size
    if entries[0] is None:
        return
    if rank == 0:
        manifest.check_seen(folder, entries)
    if world_size > 1:
        checksums.check_bytes(folder, entries[read_back()], read_back())


def read_back() -> int:
    """The rank whose files this rank reads back."""
    rank, world_size = comm.current().rank, comm.current().world_size
    return (rank + (local_size() % world_size or 1)) % world_size


def finish_running(variable: Any) -> None:
    """Finishes the table's dump in the background, if there is one; all ranks call it.

    Raises RuntimeError in a graph, where it could only be finished when an op runs.
    """
    dump = variable.__dict__.get("running_dump")
    if dump is None or dump not in running:
        return
    if not tf.executing_eagerly():
        raise RuntimeError(
            "A dump in the background must be finished, by `finish()`, before a graph dumps or "
            f"restores its table. Received: table '{variable.table_name}'"
        )
    dump.finish()
