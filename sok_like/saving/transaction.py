"""Tables beside a file of TensorFlow or Keras: the files of a save by several ranks.

    model.keras                          the common part, written by rank 0; it names the dumps
    model.keras.tables/user.3f2a9c0b/    a dump of table 'user', as `sok.Saver` writes it

All ranks make the same call with the same path. Every save writes new dumps. Then rank 0 puts the
common part in its place: from that instant the save is valid. Only then are the earlier dumps
removed. So a process that is killed at any instant leaves the last finished save intact.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.runtime.attributes import attributes
from sok_like.saving import dump_owners, saver
from sok_like.saving.format import manifest
from sok_like.table.variable import is_embedding_variable, unwrap

SUFFIX = ".tables"
_SAME_PATH = (
    "All ranks must save to the same path, on a file system that they share; if the path "
    "contains a metric, put `sok.callbacks.MetricAverage()` first in the list of callbacks. "
    "Received: {here!r} on rank {rank} and {first!r} on rank 0"
)


class Kinds:
    """The variables, out of some given ones, that are not the same on all ranks.

    Attributes:
        tables: EmbeddingVariables, each once.
        sharded: Shards of a ModelParallel. The common part holds their whole values.
        own: Other variables of single ranks, such as tables of `dist_model_parallel`.
        holders: Holders of dense tables, as checkpoints find them (`dense_pieces.py`).
    """

    def __init__(self, variables: Iterable[Any]):
        variables = list(variables)
        unwrapped = [unwrap(each) for each in variables if is_embedding_variable(each)]
        self.tables = list({id(table): table for table in unwrapped}.values())
        others = [each for each in variables if not is_embedding_variable(each)]
        self.sharded = [each for each in others if hasattr(each, "_sok_shard")]
        self.own = [
            each
            for each in others
            if getattr(each, "de_local", False) and not hasattr(each, "_sok_shard")
        ]
        self.holders = [each for each in others if hasattr(each, "dense_parts")]

    def __bool__(self):
        return bool(self.tables or self.sharded or self.own or self.holders)


def new_reference(name: str) -> str:
    """A new, unique name for a dump of a table."""
    return f"{manifest.file_stem(name)}.{secrets.randbits(62):016x}"


def folder_of(path: str, reference: str) -> str:
    """The folder of one dump beside the file at `path`."""
    return os.path.join(path + SUFFIX, reference)


def save(
    call: str,
    path: str,
    tables: Sequence[Any],
    common: Callable[[Sequence[str]], None],
    *,
    references: Sequence[str] | None = None,
    dump: Callable[[Any, str], Any] | None = None,
    kept: Sequence[str] = (),
) -> None:
    """Writes tables beside a file, then the file; all ranks call it.

    Args:
        call: The user's call, for errors.
        path: Path of the file, the same on all ranks.
        tables: EmbeddingVariables, the same on all ranks.
        common: Called on every rank with the references of the dumps. On rank 0 it puts the file
            in its place.
        references: Those that rank 0 will write into the file; None: new ones.
        dump: Writes one table to a folder, on all ranks; None: `sok.Saver` does.
        kept: Other names beside the file that belong to this save.

    Raises:
        RuntimeError: a rank has failed, or ranks differ in path or tables; on all ranks. The
            previous save is intact, unless rank 0 failed while writing the file.
    """
    communicator = comm.current()
    tables = list(tables)
    names = [table.table_name for table in tables]
    mine = list(map(new_reference, names)) if references is None else list(references)

    def start():
        _check_local(path)
        return {"path": path, "tables": names, "references": mine}

    told = agreed(start, communicator, call)
    _check_same(call, told)
    chosen = told[0]["references"]
    for table, reference in zip(tables, chosen, strict=True):
        folder = folder_of(path, reference)
        (dump or dump_table)(table, folder)
        dump_owners.forget(folder, table)
    agreed(lambda: common(chosen), communicator, call)
    if communicator.rank == 0:
        _remove_others(path, [*chosen, *kept])


def dump_table(table: Any, folder: str) -> None:
    """Writes one table, as `sok.Saver` does; all ranks call it."""
    saver.Saver().dump_to_file(table, folder, sok1_files=False)


def restore(variable: Any, path: str, reference: str) -> None:
    """Reads a table from beside the file at `path`, at any number of ranks; all ranks call it.

    As in a file of one rank, the table that was written may have had another name.

    Raises:
        RuntimeError: the dump is missing, damaged or does not fit; on all ranks. The table is then
            unchanged.
    """
    folder = folder_of(path, reference)
    # A file finds a layer by its place in the model; Keras may give its table a new name.
    saver.restored(saver.Reading(variable, folder, any_name=True))
    dump_owners.forget(folder, variable)


def remove(path: str) -> None:
    """Removes all tables beside a file that is gone."""
    shutil.rmtree(path + SUFFIX, ignore_errors=True)


def check_seen(path: str) -> None:
    """Raises FileNotFoundError if this rank does not see the file at `path`."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            "All ranks must read the same file, on a file system that they share. "
            f"Received: {path!r}, which is missing"
        )


def agree_on_file(path: str, communicator: Any, call: str) -> None:
    """Raises on all ranks unless all of them see the same bytes at `path`.

    A relative path, or one on a host's own disk, may mean another file on each rank. Ranks that
    read different files would differ silently from then on.

    Raises:
        FileNotFoundError: the file is missing, on one rank. On several it is a RuntimeError.
        RuntimeError: a rank sees no file, or a different one.
    """

    def look():
        check_seen(path)
        return _digest(path) if communicator.world_size > 1 else ""

    told = agreed(look, communicator, call)
    for rank, digest in enumerate(told):
        if digest != told[0]:
            raise RuntimeError(
                "All ranks must read the same file, on a file system that they share, or equal "
                f"copies. Received: {os.path.abspath(path)!r} on this rank, and another file on "
                f"rank {rank} than on rank 0"
            )


def _digest(path):
    """The SHA-256 of a file, or of all files of a folder."""
    found = pathlib.Path(path)
    digest = hashlib.sha256()
    for file in sorted(found.rglob("*")) if found.is_dir() else [found]:
        if file.is_file():
            digest.update(str(file.relative_to(found)).encode())
            with open(file, "rb", buffering=0) as opened:
                while data := opened.read(2**22):
                    digest.update(data)
    return digest.hexdigest()


def _check_local(path):
    if "://" in path:
        raise ValueError(
            "A save by several ranks, or of tables in a session, must be to a path of a local or "
            f"shared file system. Received: {path!r}"
        )
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def _check_same(call, told):
    first = told[0]
    for rank, each in enumerate(told):
        if each["path"] != first["path"]:
            raise RuntimeError(_SAME_PATH.format(here=each["path"], rank=rank, first=first["path"]))
        if each["tables"] != first["tables"]:
            raise RuntimeError(
                f"All ranks must save the same tables ({call}). Received: {each['tables']} on rank "
                f"{rank} and {first['tables']} on rank 0"
            )


def _remove_others(path, references):
    kept = set(references) | _kept_for_backup(path)
    with contextlib.suppress(OSError):
        for old in pathlib.Path(path + SUFFIX).iterdir():
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
    _latest[path] = set(references)


# References of the last save to a path, by this process.
_latest: dict[str, set[str]] = {}


def _kept_for_backup(path):
    """What `path.bkp` needs: BackupAndRestore(double_checkpoint=True) of Keras copies the file."""
    if not os.path.exists(f"{path}.bkp"):
        return set()
    if path in _latest:
        return _latest[path]
    with contextlib.suppress(OSError):
        return {old.name for old in pathlib.Path(path + SUFFIX).iterdir()}
    return set()


# ---- which file is being read or written; only the functions around it know ----

_now = threading.local()


def reading(path: str) -> contextlib.AbstractContextManager[None]:
    """A scope in which tables that Keras reads find their dumps beside `path`."""
    return attributes(_now, {"path_read": path})


def path_read() -> str | None:
    """The file being read; None if there is none."""
    return getattr(_now, "path_read", None)


def writing(
    tables: Sequence[Any], references: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """A scope in which tables that Keras writes write their reference."""
    pairs = zip(tables, references, strict=True)
    written = [(weakref.ref(table), reference) for table, reference in pairs]
    return attributes(_now, {"written": written})


def is_writing() -> bool:
    """Whether such a scope is active."""
    return hasattr(_now, "written")


def reference_of(variable: Any) -> str | None:
    """The dump that the file being written names for a table; None: the table goes inside."""
    found = getattr(_now, "written", ())
    return next((reference for table, reference in found if table() is variable), None)
