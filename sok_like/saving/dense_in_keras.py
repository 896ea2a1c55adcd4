"""Dense tables that are spread over ranks, in Keras' files: whole, or sliced beside the file.

    m.keras                                     on one rank: whole tables, "0", "0.momentum", "1"
    m.keras.tables/dense_rows.3f2a/0-of-2.npz   on several: the slices of rank 0

Keras visits layers and optimizers in any order, and a slot variable is sliced like its table. So
slot variables are stored with their tables, and both are read once Keras has visited all of a
model. The optimizer's other variables are where Keras puts them (`dense_pieces.py`).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.attributes import attributes
from sok_like.saving import dense_pieces, pieces, transaction
from sok_like.saving.dense_pieces import Holder
from sok_like.saving.dense_reading import Reading

ID = "tables"  # the id of the only holder in a folder
_REFERENCE, _RANKS = "beside", "ranks"
_state = threading.local()


def holders_of(model: Any) -> list[Any]:
    """The holders of a model's layers, in the same order on all ranks."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    found = [getattr(layer, "dense_in_files", None) for layer in layers]
    return list({id(each): each for each in found if each is not None}.values())


def is_hidden(layer: Any, name: str) -> bool:
    """Whether Keras' files leave out an attribute of a layer, which writes it itself."""
    return name in getattr(layer, "not_in_files", ())


# ---- writing ----


def saving(model: Any) -> contextlib.AbstractContextManager[None]:
    """A scope in which tables are written with the slot variables of the model's optimizer."""
    return dense_pieces.of_root(_optimizers(model))


def _optimizers(model):
    # Keras' files hold nothing of tf_keras' legacy optimizers.
    optimizer = getattr(model, "optimizer", None)
    return [optimizer] if hasattr(optimizer, "save_own_variables") else []


def save(holder: Holder, store: Any) -> None:
    """Writes the part of a holder that Keras' file contains.

    Raises:
        NotImplementedError: on several ranks, outside of a save of a model.
    """
    reference, ranks = transaction.reference_of(holder), comm.current().world_size
    if reference is not None:
        store[_REFERENCE] = np.frombuffer(reference.encode(), np.uint8)
        store[_RANKS] = np.array([ranks])
        return
    if ranks > 1:
        raise NotImplementedError(
            f"The tables of layer '{holder.name}' are spread over {ranks} ranks and are saved with "
            "their model: model.save('x.keras'), model.save_weights('x.weights.h5')"
        )
    for key, value in dense_pieces.wholes_of(holder):
        store[key] = (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def write_beside(holder: Any, folder: str) -> None:
    """Writes this rank's part beside the file."""
    communicator = comm.current()
    dense_pieces.write(folder, communicator.rank, communicator.world_size, [ID], [holder])


# ---- reading ----


def load(holder: Holder, store: Any, path_read: Callable[[], str]) -> None:
    """Reads what `save` wrote, at the end of `loading`.

    Args:
        path_read: Returns the path of the file being read.

    Raises:
        ValueError: the file has other tables, or none.
    """
    with dense_pieces.of_root(()):
        parts = dense_pieces.parts_of(holder)
    if _REFERENCE in store:
        reference = np.asarray(store[_REFERENCE]).tobytes().decode()
        folder = transaction.folder_of(path_read(), reference)
        reading = Reading.of_folder(folder, int(np.asarray(store[_RANKS])[0]))
    else:
        reading = Reading.of_wholes(ID, store, parts)
    reading.check_tables(holder, ID, parts)
    if getattr(_state, "found", None) is None:
        reading.restore(ID, parts)
    else:
        _state.found.append((holder, reading))


@contextlib.contextmanager
def loading(model: Any, discarded: Callable[[], bool]) -> Iterator[None]:
    """A scope that reads tables at its end, when the model's optimizer is known.

    Args:
        discarded: Whether the values must be discarded: Keras collects errors.
    """
    found: list[Any] = []
    with attributes(_state, {"found": found}):
        yield
    if not discarded():
        with dense_pieces.of_root(_optimizers(model)):
            copies = [_copy_of(*each) for each in found]
        for copy in copies:
            if pieces.expected():
                pieces.restored(copy, None)
            else:
                copy.take_aside(None)


def _copy_of(holder, reading):
    parts = dense_pieces.parts_of(holder)
    slots = [part for part in parts if "." in part.key]
    mine, received = {part.key.partition(".")[2] for part in slots}, reading.slot_names(ID)
    if mine and received and mine != received:  # Keras, too, keeps the optimizer's state then
        warnings.warn(
            f"The optimizer's state of layer '{holder.name}' is not loaded: the optimizer "
            f"has the slot variables {sorted(mine)}, the file {sorted(received)}",
            stacklevel=2,
        )
        parts = [part for part in parts if "." not in part.key]
    else:
        reading.check_slots(holder, ID, slots)
    return _Copy(reading, parts)


class _Copy:
    """Copies tables once everything of a call is read."""

    def __init__(self, reading, parts):
        self._reading, self._parts = reading, parts

    def take_aside(self, content):
        self._reading.restore(ID, self._parts)
