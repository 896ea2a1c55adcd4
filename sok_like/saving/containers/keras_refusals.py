"""Refuses what Keras' saving would do wrong with tables, or on several ranks.

The older HDF5 files (`model.save("m.h5")`) hold what each layer has on one rank, and ranks would
overwrite each other's. `overwrite=False` asks the user at a terminal, which ranks do not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sok_like.runtime.ranks import comm
from sok_like.saving.containers.keras_files import kinds_of

_OLDER = (
    "Keras' older HDF5 files hold no hash tables, and no tables spread over ranks: use "
    "a path that ends in '.weights.h5', or in '.keras' for the whole model. "
    "Received: {call} of model {name!r}{path}"
)


def write_older(own: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that writes or reads HDF5 at a path; it refuses before it opens the file."""
    path, formats = str(filepath), (*args, kwargs.get("save_format"))
    if path.endswith((".h5", ".hdf5", ".keras")) or "h5" in formats:
        _check(model, own.__name__, path)
    return own(model, filepath, *args, **kwargs)


def read_older(own: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function that reads an open HDF5 file; its second argument is the model."""
    _check(kwargs["model"] if "model" in kwargs else args[1], own.__name__)
    return own(*args, **kwargs)


def _check(model, function, path=""):
    kinds = kinds_of(model)
    if kinds.tables or ((kinds.holders or kinds.own) and comm.current().world_size > 1):
        call = f"a {function.partition('_')[0]}"
        path = path and f" with the path {path!r}"
        raise NotImplementedError(_OLDER.format(call=call, name=model.name, path=path))


def ask(own: Callable, filepath: Any) -> bool:
    """`ask_to_proceed_with_overwrite`."""
    alone = comm.current_or_single().world_size == 1
    if alone or (sys.stdin is not None and sys.stdin.isatty()):
        return own(filepath)
    raise FileExistsError(
        "With `overwrite=False` the file must not exist, as no user can be asked on several "
        f"ranks. Received: {str(filepath)!r}, which exists"
    )
