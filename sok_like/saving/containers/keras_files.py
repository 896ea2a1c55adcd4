"""Keras' files on any number of ranks: `.keras`, `.weights.h5`, and `BackupAndRestore`.

Tables are where a checkpoint has them (`checkpoints.py`): in the file, or beside it. A file is
written under another name and renamed, so a killed process leaves the previous one intact.

The older HDF5 files (`model.save("m.h5")`) hold what each layer has on one rank, so they are
refused. So is a question to the user (`overwrite=False`) on ranks without a terminal.
"""

import contextlib
import functools
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import Steps, agreed
from sok_like.saving import transaction
from sok_like.saving.containers import keras_layers
from sok_like.saving.format import durable, folders
from sok_like.saving.parts import dense_tables
from sok_like.saving.parts.checkpointable import (
    CheckpointPart,
    RankLocalVariables,
    StagedContent,
    is_of_all_ranks,
)
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table.variable import is_embedding_variable

_FILES = (".keras", ".h5")
_MARK = b"sok_like: holds tables"  # the comment of a `.keras`, which is a zip archive


def kinds_of(model: Any) -> RankLocalVariables:
    """The variables of a model that are not the same on all ranks."""
    try:
        ordinary = _ordinary(model)
    except ValueError:  # tf_keras' models have no variables before they are built
        return RankLocalVariables(())
    return RankLocalVariables([*ordinary, *keras_layers.holders_of(model)])


def _ordinary(model):
    """The variables of a model that no holder of dense tables has."""
    holders = keras_layers.holders_of(model)
    held = {id(variable) for holder in holders for variable in holder.own_variables()}
    return [variable for variable in model.variables if id(variable) not in held]


def _check(call, own_variables=()):
    """Raises NotImplementedError in a graph, and if a rank's own variables would be lost."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "Keras' files of a model with tables need eager execution; in a program without it "
            "tf.compat.v1.train.Saver saves the model, on any number of ranks. "
            f"Received: {call} without eager execution"
        )
    ranks = comm.current().world_size
    if own_variables and ranks > 1:
        raise NotImplementedError(
            f"Keras' files cannot hold variables that differ between the {ranks} ranks; "
            "tf.train.Checkpoint saves them for the same number of ranks. "
            f"Received: {call} of a model with the variable {own_variables[0].name!r}"
        )


# ---- writing ----


def save(own: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """`saving_lib.save_model` and `saving_lib.save_weights_only`."""

    def write(place):
        return own(model, place, *args, **kwargs)

    call = "a save of weights" if "weights" in own.__name__ else "a save of a model"
    kinds = kinds_of(model)
    together = bool(kinds) or is_of_all_ranks(model)
    if keras_layers.is_writing() or not together or not comm.is_initialized():
        return write(filepath)
    _check(call, kinds.own)
    with dense_tables.of_root(keras_layers.optimizers_of(model)):
        return save_together(call, filepath, write, kinds, bool(kinds.sharded))


def save_together(
    call: str,
    filepath: Any,
    write: Callable[[Any], Any],
    kinds: RankLocalVariables | None = None,
    collective: bool = True,
) -> None:
    """Writes a file on rank 0, and tables beside it; all ranks call it with the same path."""
    # If `write` is `collective`, the other ranks write a file, too, which is discarded. `kinds` are
    # tables and holders in the file, if any.
    communicator, path = comm.current(), _path(filepath)
    if communicator.world_size == 1:
        if path is None:
            write(filepath)
            return
        _replaced(path, write)
        if path.endswith(_FILES):
            folders.remove_others(path, ())  # of an earlier save by several ranks
        return
    kinds = kinds or RankLocalVariables(())
    parts: list[CheckpointPart] = [HashTablePart(table) for table in kinds.tables]
    for holder in kinds.holders:
        parts.append(dense_tables.dense_tables(holder.table_name, [holder], [keras_layers.HOLDER]))

    def common(references):
        if path is None:
            raise TypeError(f"On several ranks `filepath` must be a path. Received: {filepath!r}")
        with keras_layers.writing([*kinds.tables, *kinds.holders], references):
            if communicator.rank == 0:
                _replaced(path, write)
            elif collective:
                with tempfile.TemporaryDirectory(prefix="sok_save_") as folder:
                    write(os.path.join(folder, os.path.basename(path)))

    transaction.Saving(Steps(call, own_error=True), parts, path or "", common).run()


def _replaced(path, write):
    local = durable.local(path)
    if local is None or not path.endswith(_FILES):
        write(path)
        return
    folder, name = os.path.split(local)
    aside = os.path.join(folder, f".writing-{name}")
    try:
        write(aside)
        if zipfile.is_zipfile(aside):  # so that ranks load it together, whoever's layers it names
            with zipfile.ZipFile(aside, "a") as archive:
                archive.comment = _MARK
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        durable.rename(aside, local)
    finally:
        durable.remove(aside)


# ---- reading ----


def load_weights(own: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """`saving_lib.load_weights_only`."""
    call, kinds = "a load of weights", kinds_of(model)
    if not kinds or not comm.is_initialized():
        return own(model, filepath, *args, **kwargs)
    _check(call, kinds.own)

    def read():
        transaction.prepare(_values_before(model))
        return own(model, filepath, *args, **kwargs)

    return transaction.load(call, _path(filepath), read)


def _values_before(model):
    """The values of a model's ordinary variables, which Keras replaces while it reads."""
    variables = _ordinary(model)
    for optimizer in keras_layers.optimizers_of(model):
        variables += dense_tables.ordinary(optimizer)
    restores = []
    for variable in (each for each in variables if not is_embedding_variable(each)):
        if hasattr(variable, "_sok_shard"):  # whose own `numpy()` would be a collective
            handle, dtype = variable.handle, tf.as_dtype(variable.dtype)
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
            assign = functools.partial(tf.raw_ops.AssignVariableOp, resource=handle, value=value)
        else:
            assign = functools.partial(variable.assign, np.asarray(variable).copy())
        restores.append(assign)

    def restore():
        for assign in restores:
            assign()

    return StagedContent(restores.clear, restore)


def walk(own: Callable, *args: Any) -> Iterator[tuple[str, Any]]:
    """`saving_lib._walk_saveable`: leaves out what a layer writes itself."""
    for name, child in own(*args):
        if name not in getattr(args[0], "not_in_files", ()):
            yield name, child


def load_model(own: Callable, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """`saving_lib.load_model`."""
    if not comm.is_initialized():
        return own(filepath, *args, **kwargs)
    ours, call = False, "a load of a model"
    with contextlib.suppress(OSError, KeyError, TypeError, zipfile.BadZipFile):
        with zipfile.ZipFile(filepath) as archive:
            ours = archive.comment == _MARK or b"sok_like" in archive.read("config.json")
    if ours:
        _check(call)
    read = functools.partial(own, filepath, *args, **kwargs)
    return transaction.load(call, _path(filepath), read, collective=ours)


def _path(filepath):
    return os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None


# ---- BackupAndRestore ----


def remove_backup(own: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The removal of a backup that ranks share: rank 0 removes it once all are done."""
    model = getattr(self, "model", None) or getattr(self, "_model", None)
    communicator, call = comm.current_or_single(), "the end of BackupAndRestore"
    run = functools.partial(own, self, *args, **kwargs)
    if communicator.world_size == 1 or not (kinds_of(model) or is_of_all_ranks(model)):
        return run()
    agreed(None, communicator, call)
    agreed(run if communicator.rank == 0 else None, communicator, call)
    return None


# ---- what Keras' saving would do wrong with tables, or on several ranks ----


def write_older(own: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that writes or reads HDF5 at a path; it refuses before it opens the file."""
    path, formats = str(filepath), (*args, kwargs.get("save_format"))
    if path.endswith((".h5", ".hdf5", ".keras")) or "h5" in formats:
        _check_older(model, own.__name__, path)
    return own(model, filepath, *args, **kwargs)


def read_older(own: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function that reads an open HDF5 file; its second argument is the model."""
    _check_older(kwargs["model"] if "model" in kwargs else args[1], own.__name__)
    return own(*args, **kwargs)


def _check_older(model, function, path=""):
    kinds = kinds_of(model)
    if kinds.tables or ((kinds.holders or kinds.own) and comm.current().world_size > 1):
        path = path and f" with the path {path!r}"
        raise NotImplementedError(
            "Keras' older HDF5 files hold no hash tables, and no tables spread over ranks: use "
            "a path that ends in '.weights.h5', or in '.keras' for the whole model. "
            f"Received: a {function.partition('_')[0]} of model {model.name!r}{path}"
        )


def ask(own: Callable, filepath: Any) -> bool:
    """`ask_to_proceed_with_overwrite`."""
    alone = comm.current_or_single().world_size == 1
    if alone or (sys.stdin is not None and sys.stdin.isatty()):
        return own(filepath)
    raise FileExistsError(
        "With `overwrite=False` the file must not exist, as no user can be asked on several "
        f"ranks. Received: {str(filepath)!r}, which exists"
    )
