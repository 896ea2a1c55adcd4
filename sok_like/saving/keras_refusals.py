"""Refuses what Keras' saving would do wrong with tables, or on several ranks.

The older HDF5 files (`model.save("m.h5")`) hold what each layer has on one rank, and ranks would
overwrite each other's. `overwrite=False` asks the user at a terminal, which ranks do not have.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from sok_like.runtime import comm
from sok_like.table.keras_variable import is_keras_3

_OLDER = (
    "Keras' older HDF5 files hold no hash tables, and no tables spread over ranks: use "
    "a path that ends in '.weights.h5', or in '.keras' for the whole model. "
    "Received: {call} of model {name!r}{path}"
)


def install(kinds_of: Callable[[Any], Any]) -> None:
    """Wraps Keras' functions.

    Args:
        kinds_of: Returns the `pieces.Kinds` of a model.
    """
    package = "keras.src" if is_keras_3() else "tf_keras.src"
    asking: Any = importlib.import_module(f"{package}.utils.io_utils")
    asking.ask_to_proceed_with_overwrite = _asking(asking.ask_to_proceed_with_overwrite)
    if is_keras_3():
        older: Any = importlib.import_module(f"{package}.legacy.saving.legacy_h5_format")
        wrapped = {"save_model_to_hdf5": _writing}
        wrapped |= dict.fromkeys(_READERS, _reading)
    else:
        older = importlib.import_module(f"{package}.saving.legacy.save")
        wrapped = {"save_model": _writing, "save_weights": _writing, "load_weights": _writing}
    for name, wrap in wrapped.items():
        setattr(older, name, wrap(getattr(older, name), name.partition("_")[0], kinds_of))


_READERS = ("load_weights_from_hdf5_group", "load_weights_from_hdf5_group_by_name")


def _check(model, call, kinds_of, path=""):
    kinds = kinds_of(model)
    if kinds.tables or ((kinds.holders or kinds.own) and comm.current().world_size > 1):
        path = path and f" with the path {path!r}"
        raise NotImplementedError(_OLDER.format(call=f"a {call}", name=model.name, path=path))


def _writing(own, call, kinds_of):
    """Wraps a function of a model and a path; it refuses before it opens the file."""

    @functools.wraps(own)
    def run(model, filepath, *args, **kwargs):
        path, formats = str(filepath), (*args, kwargs.get("save_format"))
        if path.endswith((".h5", ".hdf5", ".keras")) or "h5" in formats:
            _check(model, call, kinds_of, path)
        return own(model, filepath, *args, **kwargs)

    return run


def _reading(own, call, kinds_of):
    @functools.wraps(own)
    def run(file, model, *args, **kwargs):
        _check(model, call, kinds_of)
        return own(file, model, *args, **kwargs)

    return run


def _asking(own):
    @functools.wraps(own)
    def ask(filepath):
        alone = comm.current_or_single().world_size == 1
        if alone or (sys.stdin is not None and sys.stdin.isatty()):
            return own(filepath)
        raise FileExistsError(
            "With `overwrite=False` the file must not exist, as no user can be asked on several "
            f"ranks. Received: {str(filepath)!r}, which exists"
        )

    return ask
