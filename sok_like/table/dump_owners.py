"""What dumps and restores of tables have in common: who may write where, and errors that say so."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_like.runtime import comm
from sok_like.runtime.process import local_size
from sok_like.table import dump_file
from sok_like.table.variable import is_embedding_variable, unwrap

# Who wrote or read the dump in a folder, by folder and table name. Variables have no hash.
_known_by: dict[tuple[str, str], list[weakref.ref]] = {}


def checked(variable: Any) -> Any:
    """The EmbeddingVariable; an error of anything else, and of one that only `sok2.dump` takes."""
    if not is_embedding_variable(variable):
        raise TypeError(
            f"`embedding_variable` must be an EmbeddingVariable. Received: {variable!r}"
        )
    variable = unwrap(variable)
    if variable.home is not None and comm.current().world_size > 1:
        raise ValueError(
            "`embedding_variable` must have its keys on rank key % world_size. Received: table "
            f"'{variable.table_name}', all on rank {variable.home}; sok_like.sok2.dump takes it"
        )
    return variable


def check_arguments(variable: Any, filepath: Any, **flags: Any) -> None:
    """What the methods of a Saver are given: a folder, and flags by name.

    Raises:
        TypeError: `filepath` is not a str or an os.PathLike, or a flag is not a bool.
        ValueError: an empty `filepath`, which would be the working directory.
    """
    table = variable.table_name
    if not isinstance(filepath, (str, os.PathLike)) or isinstance(os.fspath(filepath), bytes):
        raise TypeError(
            "`filepath` must be a folder, as a str or an os.PathLike. "
            f"Received: filepath={filepath!r} (table '{table}')"
        )
    if filepath == "":
        raise ValueError(
            "`filepath` must name a folder; '.' is the working directory. "
            f"Received: filepath='' (table '{table}')"
        )
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(
                f"`{name}` must be True or False. Received: {name}={value!r} (table '{table}')"
            )


def _place(folder, table):
    return os.path.realpath(folder), table


def wrote(folder: str, variable: Any) -> None:
    """The dump in a folder is this table's."""
    _known_by[_place(folder, variable.table_name)] = [weakref.ref(variable)]


def read(folder: str, variable: Any) -> None:
    """The dump in a folder is this table's, too."""
    _known_by.setdefault(_place(folder, variable.table_name), []).append(weakref.ref(variable))


def forget(folder: str, variable: Any) -> None:
    """Lets other tables of this name write to a folder, which is one dump's own."""
    _known_by.pop(_place(folder, variable.table_name), None)


def check_owner(folder: str, variable: Any) -> None:
    """ValueError where a dump would replace that of another table of this program."""
    known = [ref() for ref in _known_by.get(_place(folder, variable.table_name), [])]
    alive = [table for table in known if table is not None]
    if alive and all(table is not variable for table in alive):
        raise ValueError(
            "Tables that are dumped into one folder must have different names. Received: two "
            f"tables '{variable.table_name}' for {folder!r}; dump one of them into another folder"
        )


def same_dump(told: list) -> None:
    """RuntimeError unless all ranks have told of the same `dump`."""
    if len({message["dump"] for message in told}) > 1:
        raise RuntimeError(
            "All ranks must read the same dump, from a folder that they share. Received: different "
            "dumps"
        )


def see_shards(folder: str, entries: Sequence[Any]) -> None:
    """Raises unless the folder shows all shards of a dump, before its manifest may name them.

    Rank 0 looks at all of them. Every shard is read back by one rank that did not write it, of
    another host where there are several: a rank reads as much as it wrote.

    Args:
        entries: What `write_shard` has returned, by rank; None where there was nothing to write.
    """
    rank, world_size = comm.current().rank, comm.current().world_size
    if entries[0] is None:
        return
    if rank == 0:
        dump_file.check_seen(folder, entries)
    if world_size > 1:
        other = (rank + (local_size() % world_size or 1)) % world_size
        dump_file.check_bytes(folder, entries[other], other)


def explained(error: OSError, table: str) -> OSError:
    """The same, naming the table."""
    return OSError(error.errno, f"{error.strerror} (dump of table '{table}')", error.filename)
