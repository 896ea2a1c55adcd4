"""Keras' files on any number of ranks: `.keras`, `.weights.h5`, and `BackupAndRestore`.

On one rank a table's content is inside the file. On several, all ranks make the same call with the
same path. Rank 0 writes the file, and every rank its part of the tables beside it. Both kinds can
be read at any number of ranks. This module finds the pieces in a model; `transaction.py` keeps the
promises.

A file is written under another name and renamed, so a killed process leaves the previous one
intact. Keras has no hook where ranks could agree, so `install` wraps its four functions that write
and read files. For models without tables and shards they do what they did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.saving import (
    checkpoints,
    dense_in_keras,
    folders,
    keras_refusals,
    optimizer_variables,
    transaction,
)
from sok_like.saving.hash_pieces import HashPiece
from sok_like.saving.pieces import Kinds, Piece, Prepared
from sok_like.table.keras_variable import is_keras_3
from sok_like.table.variable import is_embedding_variable

_FILES = (".keras", ".h5")
_OWN_VARIABLES = (
    "Keras' files cannot hold variables that differ between the {ranks} ranks; "
    "tf.train.Checkpoint saves them for the same number of ranks. "
    "Received: {call} of a model with the variable {name!r}"
)
_IN_A_GRAPH = (
    "Keras' files of a model with tables need eager execution; in a program without it "
    "tf.compat.v1.train.Saver saves the model, on any number of ranks. "
    "Received: {call} without eager execution"
)


@functools.cache
def install() -> None:
    """Teaches the running Keras' files, and checkpoints, tables and shards; once per process."""
    checkpoints.install()
    keras_refusals.install(_kinds)
    package = "keras.src" if is_keras_3() else "tf_keras.src"
    library: Any = importlib.import_module(f"{package}.saving.saving_lib")
    library.save_model = _saving(library.save_model, "a save of a model")
    library.save_weights_only = _saving(library.save_weights_only, "a save of weights")
    library.load_model = _loading_model(library.load_model)
    library.load_weights_only = _loading_weights(library.load_weights_only)
    library._load_state = _loading_state(library._load_state)
    walk = "_walk_saveable" if is_keras_3() else "_walk_trackable"
    setattr(library, walk, _walking(getattr(library, walk)))
    if is_keras_3():
        module = importlib.import_module(f"{package}.callbacks.backup_and_restore")
        cls, method = module.BackupAndRestore, "on_train_end"
        # Keras checks whether a folder exists and then makes it; another rank may be faster.
        module.file_utils.makedirs = tf.io.gfile.makedirs
    else:
        module = importlib.import_module(f"{package}.distribute.worker_training_state")
        cls, method = module.WorkerTrainingState, "delete_backup"
    setattr(cls, method, _by_rank_0(getattr(cls, method)))


def _kinds(model):
    """The variables of a model that are not the same on all ranks."""
    try:
        ordinary = _ordinary(model)
    except ValueError:  # tf_keras' models have no variables before they are built
        return Kinds(())
    return Kinds([*ordinary, *dense_in_keras.holders_of(model)])


def _ordinary(model):
    """The variables of a model that no holder of dense tables has."""
    holders = dense_in_keras.holders_of(model)
    held = {id(each) for holder in holders for each in holder.own_variables()}
    return [each for each in model.variables if id(each) not in held]


def _check_eager(call):
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(_IN_A_GRAPH.format(call=call))


def _check(kinds, call):
    """Raises NotImplementedError if a rank's own variables would be lost."""
    ranks = comm.current().world_size
    if kinds.own and ranks > 1:
        raise NotImplementedError(
            _OWN_VARIABLES.format(ranks=ranks, call=call, name=kinds.own[0].name)
        )


# ---- writing ----


def _saving(own, call):
    @functools.wraps(own)
    def save(model, filepath, *args, **kwargs):
        def write(place):
            return own(model, place, *args, **kwargs)

        kinds = _kinds(model)
        if transaction.is_writing() or not kinds or not comm.is_initialized():
            return write(filepath)
        _check_eager(call)
        _check(kinds, call)
        with optimizer_variables.of_root(dense_in_keras.optimizers_of(model)):
            return save_together(call, filepath, write, kinds, bool(kinds.sharded))

    return save


def save_together(
    call: str,
    filepath: Any,
    write: Callable[[Any], Any],
    kinds: Kinds | None = None,
    collective: bool = True,
) -> None:
    """Writes a file on rank 0, and tables beside it; all ranks call it with the same path.

    Args:
        call: The user's call, for errors.
        filepath: Path of the file.
        write: Writes a file to the path that it is given.
        kinds: The tables in the file, and the holders of dense tables; None: neither.
        collective: Whether writing involves all ranks. Then the other ranks write, too, to a file
            that is discarded.

    Raises:
        RuntimeError: a rank has failed, or paths differ; on all ranks. The previous file stays.
    """
    communicator = comm.current()
    named = isinstance(filepath, (str, os.PathLike))
    path = os.fspath(filepath) if named else ""
    if communicator.world_size == 1:
        if not named or "://" in path or not path.endswith(_FILES):
            write(filepath)
            return
        _replaced(path, write)
        folders.remove_all(path)  # of an earlier save by several ranks
        return
    kinds = kinds or Kinds(())
    pieces: list[Piece] = [HashPiece(table) for table in kinds.tables]
    pieces += map(dense_in_keras.piece_of, kinds.holders)

    def common(references):
        if not named:
            raise TypeError(f"On several ranks `filepath` must be a path. Received: {filepath!r}")
        with transaction.writing([*kinds.tables, *kinds.holders], references):
            if communicator.rank == 0:
                _replaced(path, write) if path.endswith(_FILES) else write(path)
            elif collective:
                with tempfile.TemporaryDirectory(prefix="sok_save_") as folder:
                    write(os.path.join(folder, os.path.basename(path)))

    transaction.save(call, path, pieces, common)


def _replaced(path, write):
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".writing-{name}")
    try:
        write(aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


# ---- reading ----


def _loading_weights(own):
    @functools.wraps(own)
    def load(model, filepath, *args, **kwargs):
        call, kinds = "a load of weights", _kinds(model)
        read = functools.partial(own, model, filepath, *args, **kwargs)
        if not kinds or not comm.is_initialized():
            return read()
        _check_eager(call)
        _check(kinds, call)

        def run():
            transaction.prepare(_Replaced(model))
            return read()

        return transaction.load(call, _path(filepath), run)

    return load


class _Replaced(Prepared):
    """The values of a model's ordinary variables, which Keras replaces while it reads."""

    def __init__(self, model):
        # Reading a shard would be a collective, and pieces take their content at the end.
        known = _ordinary(model)
        for optimizer in dense_in_keras.optimizers_of(model):
            known += optimizer_variables.ordinary(optimizer)
        self._kept = [
            (each, np.asarray(each).copy())
            for each in known
            if not is_embedding_variable(each) and not hasattr(each, "_sok_shard")
        ]

    def commit(self):
        self._kept.clear()

    def drop(self):
        for variable, value in self._kept:
            variable.assign(value)


def _loading_state(own):
    """Wraps Keras' walk through what it loads; it calls itself for inner objects."""

    @functools.wraps(own)
    def load(saveable, weights_store, assets_store, inner_path, *args, **kwargs):
        def run():
            return own(saveable, weights_store, assets_store, inner_path, *args, **kwargs)

        if inner_path:
            return run()

        def discarded():
            return bool(kwargs.get("failed_saveables")) and not kwargs.get("skip_mismatch")

        with dense_in_keras.loading(saveable, discarded):
            return run()

    return load


def _walking(own):
    @functools.wraps(own)
    def walk(saveable):
        for name, child in own(saveable):
            if not dense_in_keras.is_hidden(saveable, name):
                yield name, child

    return walk


def _loading_model(own):
    @functools.wraps(own)
    def load(filepath, *args, **kwargs):
        if not comm.is_initialized():
            return own(filepath, *args, **kwargs)
        ours, call = _names_this_package(filepath), "a load of a model"
        if ours:
            _check_eager(call)
        read = functools.partial(own, filepath, *args, **kwargs)
        return transaction.load(call, _path(filepath), read, collective=ours)

    return load


def _path(filepath):
    return os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None


def _names_this_package(filepath):
    with contextlib.suppress(OSError, KeyError, TypeError, zipfile.BadZipFile):
        with zipfile.ZipFile(filepath) as archive:
            return b"sok_like" in archive.read("config.json")
    return False


# ---- BackupAndRestore ----


def _by_rank_0(own):
    """Wraps the removal of a backup that ranks share: rank 0 removes it once all are done."""

    @functools.wraps(own)
    def remove(self, *args, **kwargs):
        model = getattr(self, "model", None) or getattr(self, "_model", None)
        communicator = comm.current_or_single()
        run = functools.partial(own, self, *args, **kwargs)
        if communicator.world_size == 1 or not _kinds(model):
            return run()
        call = "the end of BackupAndRestore"
        agreed(None, communicator, call)
        agreed(run if communicator.rank == 0 else None, communicator, call)

    return remove
