"""Keras' files on any number of ranks: `.keras`, `.weights.h5`, and `BackupAndRestore`.

On one rank a table's content is inside the file. On several, all ranks make the same call with the
same path. Rank 0 writes the file, and every rank its part of the tables beside it
(`transaction.py`). Both kinds can be read at any number of ranks.

A file is written under another name and renamed, so a killed process leaves the previous one
intact. Keras has no hook where ranks could agree, so `install` wraps its four functions that write
and read files. For models without tables and shards they do what they did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.saving import checkpoints, dense_in_keras, keras_refusals, transaction
from sok_like.saving.pieces import together
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
        return transaction.Kinds(())
    return transaction.Kinds([*ordinary, *dense_in_keras.holders_of(model)])


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
        with dense_in_keras.saving(model):
            spread = [*kinds.tables, *kinds.holders]
            return save_together(call, filepath, write, spread, bool(kinds.sharded))

    return save


def save_together(
    call: str,
    filepath: Any,
    write: Callable[[Any], Any],
    tables: Sequence[Any] = (),
    collective: bool = True,
) -> None:
    """Writes a file on rank 0, and tables beside it; all ranks call it with the same path.

    Args:
        call: The user's call, for errors.
        filepath: Path of the file.
        write: Writes a file to the path that it is given.
        tables: The tables in the file, and the holders of dense tables.
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
        transaction.remove(path)  # of an earlier save by several ranks
        return

    def common(references):
        if not named:
            raise TypeError(f"On several ranks `filepath` must be a path. Received: {filepath!r}")
        with transaction.writing(tables, references):
            if communicator.rank == 0:
                _replaced(path, write) if path.endswith(_FILES) else write(path)
            elif collective:
                with tempfile.TemporaryDirectory(prefix="sok_save_") as folder:
                    write(os.path.join(folder, os.path.basename(path)))

    transaction.save(call, path, tables, common, dump=_dump)


def _dump(table, folder):
    if hasattr(table, "dense_parts"):
        agreed(lambda: dense_in_keras.write_beside(table, folder), comm.current())
    else:
        transaction.dump_table(table, folder)


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
        if kinds and comm.is_initialized():
            _check_eager(call)
            _check(kinds, call)
        with _put_back(model if kinds.tables or kinds.holders else None):
            read = functools.partial(own, model, filepath, *args, **kwargs)
            return _together(call, bool(kinds), filepath, read)

    return load


@contextlib.contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """If an error is raised within it, restores the values of ordinary variables, on all ranks."""
    # An error leaves some of these loaded. Reading a shard would be a collective, and dense tables
    # of holders are loaded last, when nothing can fail.
    kept = [
        (each, np.asarray(each).copy())
        for each in ([] if model is None else _ordinary(model))
        if not is_embedding_variable(each) and not hasattr(each, "_sok_shard")
    ]
    try:
        yield
    except BaseException:
        for variable, value in kept:
            variable.assign(value)
        raise


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
        ours = _names_this_package(filepath)
        call = "a load of a model"
        return _together(call, ours, filepath, lambda: own(filepath, *args, **kwargs))

    return load


def _together(call, ours, filepath, read):
    named = isinstance(filepath, (str, os.PathLike))
    if not ours or not named or not comm.is_initialized():
        return read()
    _check_eager(call)
    path, loaded = os.fspath(filepath), []

    def run():
        with transaction.reading(path):
            loaded.append(read())

    transaction.agree_on_file(path, comm.current(), call)
    with together():
        agreed(run, comm.current(), call)
    return loaded[0]


def _names_this_package(filepath):
    with contextlib.suppress(OSError, KeyError, TypeError, zipfile.BadZipFile):
        with zipfile.ZipFile(filepath) as archive:
            return b"sok_like" in archive.read("config.json")
    return False


def path_read() -> str:
    """The file that Keras is reading at the moment.

    Raises:
        RuntimeError: its path is not known.
    """
    path = transaction.path_read()
    frame: Any = sys._getframe(1)
    while path is None and frame is not None:
        # `load_model` may make the first layer of a process, which calls `install` only then.
        if frame.f_code.co_name in ("load_model", "load_weights_only"):
            found = frame.f_locals.get("filepath")
            path = os.fspath(found) if isinstance(found, (str, os.PathLike)) else None
        frame = frame.f_back
    if path is None:
        raise RuntimeError(
            "A file that several ranks wrote must be read by its path, as its tables lie beside "
            "it. Received: a file object"
        )
    return path


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
