"""Dense tables that are spread over ranks, in Keras' files: whole, or sliced beside the file.

    m.keras                                     on one rank: whole tables, "dense.=user",
                                                "dense.=user.momentum", "dense.=item"
    m.keras.tables/dense_rows.3f2a/0-of-2.npz   on several: the slices of rank 0

Keras visits layers and optimizers in any order, and a slot variable is sliced like its table. So
slot variables are stored with their tables, and both are read once Keras has visited all of a
model. The optimizer's other variables are where Keras puts them (`dense_tables.py`).
"""

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.saving import transaction
from sok_like.saving.containers import keras_layers
from sok_like.saving.format import checksums
from sok_like.saving.parts import dense_tables, optimizer_variables
from sok_like.table.slices import TableSlice

ID = "tables"  # the id of the only holder in a folder
_PREFIX = "dense."  # of its arrays in a file
_RANKS = "ranks"  # the number that wrote a folder
_state = threading.local()


def holders_of(model: Any) -> list[Any]:
    """The holders of a model's layers, in the same order on all ranks."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    holders = [getattr(layer, "dense_in_files", None) for layer in layers]
    return list({id(holder): holder for holder in holders if holder is not None}.values())


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of a model if Keras' files hold it."""
    # They hold nothing of tf_keras' legacy optimizers.
    optimizer = getattr(model, "optimizer", None)
    return [optimizer] if hasattr(optimizer, "save_own_variables") else []


def save(holder: dense_tables.Holder, store: Any) -> None:
    """Writes the part of a holder that Keras' file contains."""
    what = f"The tables of layer '{holder.name}' are"
    if keras_layers.save_reference(store, _PREFIX, holder, what):
        store[_PREFIX + _RANKS] = np.array([comm.current().world_size])
        return
    wholes = (
        (key, (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy())
        for key, value in dense_tables.wholes_of(holder)
    )
    checksums.write_arrays(store, wholes, _PREFIX)


def load(holder: dense_tables.Holder, store: Any) -> None:
    """Reads what `save` wrote, at the end of `loading`."""
    with optimizer_variables.of_root(()):
        parts = dense_tables.parts_of(holder)
    names = [key.removeprefix(_PREFIX) for key in store.keys() if key.startswith(_PREFIX)]
    arrays = keras_layers.Arrays(store, _PREFIX, names)
    if _RANKS in arrays:
        folder = keras_layers.folder_of(arrays)
        in_folder = dense_tables.read_folder(folder, int(arrays[_RANKS][0]))
        stored = in_folder.get(ID, dense_tables.NO_TABLES)
        stored = stored.renumbered(_matched(holder, stored.tables()))
    else:
        keys = _matched(holder, [key for key in names if re.fullmatch(r"\d+|=[^.]+", key)])
        checksums.check_arrays(arrays, f"the tables of layer '{holder.name}'")
        stored = dense_tables.StoredTables.of_slices(_slices_in(arrays, parts, keys))
    stored.check_tables(holder, parts)
    if getattr(_state, "loaded", None) is None:
        transaction.prepare(stored.prepare(parts))
    else:
        _state.loaded.append((holder, stored))


def _matched(holder, tables):
    keys, problem = dense_tables.match(holder, tables, "The file")
    keras_layers.check(problem, bool(keys))
    return keys


def _slices_in(store, parts, keys):
    """This rank's slices of whole tables and slot variables, which are copied at once."""
    nothing = TableSlice((0, 0), (0, 0))
    slices, places = {}, {part.key: part.held.place for part in parts}
    for key in store.keys():
        table, dot, slot = key.partition(".")
        if table not in keys:
            continue
        whole, table = np.asarray(store[key]), keys[table]
        place = places.get(table, nothing)
        read = functools.partial(np.asarray, np.array(whole[place.slices]))
        slices[f"{table}{dot}{slot}"] = whole.shape, place, read
    return slices


@contextlib.contextmanager
def loading(model: Any, discarded: Callable[[], bool]) -> Iterator[None]:
    """A scope that prepares tables at its end, unless Keras has collected errors: `discarded`."""
    loaded: list[Any] = []
    with attributes(_state, {"loaded": loaded}):
        yield
    if discarded():
        return
    with optimizer_variables.of_root(optimizers_of(model)):
        for holder, stored in loaded:
            transaction.prepare(stored.prepare(_parts_in(holder, stored)))


def _parts_in(holder, stored):
    """The parts of a holder that are read; not slot variables of another optimizer."""
    parts = dense_tables.parts_of(holder)
    expected = {part.key.partition(".")[2] for part in parts if "." in part.key}
    received = stored.slot_names()
    if expected and received and expected != received:  # Keras, too, keeps the state then
        warnings.warn(
            f"The optimizer's state of layer '{holder.name}' is not loaded: the optimizer "
            f"has the slot variables {sorted(expected)}, the file {sorted(received)}",
            stacklevel=2,
        )
        return [part for part in parts if "." not in part.key]
    stored.check_slots(holder, parts)
    return parts
