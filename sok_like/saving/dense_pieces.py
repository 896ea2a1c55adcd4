"""Dense tables that are spread over ranks, in `tf.train.Checkpoint`, for any number of ranks.

    model.ckpt                                the rest, and the name of each holder
    model.ckpt.tables/dense.3f2a/0-of-2.npz   the slices of rank 0, a block of rows at a time

A holder, such as a layer of `dist_model_parallel`, says which rows and columns of which whole
tables lie on this rank, and the same for the optimizer's slot variables. On one rank the whole
tables are inside the checkpoint. A reader takes its own slices out of the blocks of all files.

TensorFlow knows an optimizer's variables by their positions in lists, which would differ between
ranks. So the lists that it sees do not contain the holders' variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pathlib
import threading
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sok_like.runtime.attributes import attributes
from sok_like.table.keras_variable import is_keras_3

KEY = "sok_like/dense"  # name of the tensor that says where the tables are
BLOCK_BYTES = 8 * 2**20
_state = threading.local()
_holders: weakref.WeakSet = weakref.WeakSet()


class Part(NamedTuple):
    """A slice of a whole table, or of one of its slot variables."""

    key: str  # "<table>" or "<table>.<slot variable>"
    shape: tuple[int, int]  # of the whole table
    rows: tuple[int, int]  # of this rank: from, to
    columns: tuple[int, int]
    variable: tf.Variable
    first_row: int  # of the slice within the variable
    written: bool  # False if another rank writes the same slice


class Holder(Protocol):
    """An object that holds dense tables; `tf.train.Checkpoint` sees it as a Trackable."""

    name: str  # for errors
    id: str  # in files; unique within a process
    read_as: str | None  # its id in the file that is read

    def dense_parts(self, optimizers: Sequence[Any]) -> list[Part]:
        """The parts of this rank, with their slot variables in these optimizers."""

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the whole tables by key, including those of which this rank has no part."""

    def own_variables(self) -> list[Any]:
        """This rank's variables."""

    def variables_in(self, optimizer: Any) -> list[Any]:
        """The holder's variables that an optimizer knows, and their slot variables."""


def register(holder: Holder) -> None:
    """From now on, optimizers keep the holder's variables out of checkpoints."""
    _holders.add(holder)
    _install()


# ---- an optimizer as TensorFlow sees it ----


@functools.cache
def _install():
    if is_keras_3():
        cls: Any = importlib.import_module("keras.src.backend.tensorflow.optimizer").TFOptimizer
    else:
        cls = importlib.import_module("tf_keras.src.optimizers.optimizer")._BaseOptimizer
    own = cls._trackable_children

    @functools.wraps(own)
    def children(self, save_type="checkpoint", **kwargs):
        found = own(self, save_type, **kwargs)
        hidden = save_type == "checkpoint" and _hidden(self)
        if not hidden:
            return found
        kept = vars(self).setdefault("_sok_lists", {})
        for name, child in found.items():
            items = child._trackable_children() if isinstance(child, list) else {}
            if items:
                kept.setdefault(name, _Others()).fill(items, hidden)
                found[name] = kept[name]
        return found

    cls._trackable_children = children
    cls.save_own_variables = _saving(cls.save_own_variables)
    cls.load_own_variables = _loading(cls.load_own_variables)


def _saving(own):
    """In Keras' files: an optimizer's variables by number, without those of holders."""

    @functools.wraps(own)
    def save(self, store):
        hidden = _hidden(self)
        if not hidden:
            return own(self, store)
        for number, variable in enumerate(_ordinary(self, hidden)):
            store[str(number)] = np.asarray(variable)

    return save


def _loading(own):
    @functools.wraps(own)
    def load(self, store):
        hidden = _hidden(self)
        if not hidden:
            return own(self, store)
        ordinary = _ordinary(self, hidden)
        if len(store.keys()) != len(ordinary):  # as Keras does
            warnings.warn(
                f"The state of optimizer '{self.name}' is not loaded: the optimizer has "
                f"{len(ordinary)} variables, the file {len(store.keys())}",
                stacklevel=2,
            )
            return
        for number, variable in enumerate(ordinary):
            variable.assign(np.array(store[str(number)]))

    return load


def _ordinary(optimizer, hidden):
    return [each for each in optimizer.variables if id(each) not in hidden]


def _hidden(optimizer):
    return {id(v) for holder in list(_holders) for v in holder.variables_in(optimizer)}


class _Others(tf.__internal__.tracking.Trackable):
    """A list of an optimizer's variables without those of holders."""

    def fill(self, items, hidden):
        ordered = [items[name] for name in sorted(items, key=int) if id(items[name]) not in hidden]
        self._items = {str(i): item for i, item in enumerate(ordered)}

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        return dict(self._items)

    def _lookup_dependency(self, name, cached_dependencies=None):
        return self._items.get(name)


# ---- the objects of one call of `tf.train.Checkpoint` ----


def of_root(objects: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """A scope in which holders take their optimizers from these objects, to write or read."""
    return attributes(_state, {"optimizers": [each for each in objects if is_optimizer(each)]})


def is_optimizer(thing: Any) -> bool:
    """Whether it is an optimizer of either Keras or of TensorFlow."""
    return hasattr(thing, "apply_gradients") and not hasattr(thing, "compile")


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer has created its slot variables."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    if hasattr(inner, "get_slot_names"):
        return bool(inner.get_slot_names()) or not hasattr(inner, "_create_all_weights")
    return bool(
        getattr(inner, "_index_dict", None) or getattr(inner, "_trainable_variables_indices", None)
    )


def build_optimizers(objects: Sequence[Any], path: str) -> None:
    """Makes the slot variables that the checkpoint has, so that positions in lists agree.

    Raises:
        ValueError: an optimizer is not built and belongs to no built model among the objects.
    """
    note = note_of(path)
    if note is None or not note["slots"]:
        return
    for model in objects:
        optimizer = getattr(model, "optimizer", None)
        if getattr(model, "built", False) and optimizer is not None and not is_built(optimizer):
            if hasattr(optimizer, "_create_all_weights"):
                optimizer._create_all_weights(model.trainable_variables)
            elif hasattr(optimizer, "build"):
                optimizer.build(model.trainable_variables)
    for optimizer in filter(is_optimizer, objects):
        if not is_built(optimizer):
            raise ValueError(
                "An optimizer of dense tables must be built before a checkpoint is restored: call "
                "its build(model.trainable_variables). Received: an optimizer "
                f"{type(optimizer).__name__} without slot variables"
            )


def parts_of(holder: Holder) -> list[Part]:
    """The holder's parts on this rank, with slot variables of the optimizers of `of_root`."""
    return holder.dense_parts(getattr(_state, "optimizers", ()))


# ---- writing ----


def tensors_of(holders: Sequence[Holder]) -> Iterator[tuple[str, Any]]:
    """On one rank: whole tables by their names in the checkpoint, then the note."""
    slots = False
    for holder in holders:
        for key, value in wholes_of(holder):
            slots = slots or "." in key
            yield f"{KEY}/{holder.id}/{key}", value
    yield KEY, json.dumps({"folder": None, "slots": slots})


def wholes_of(holder: Holder) -> Iterator[tuple[str, Any]]:
    """On one rank: the key and value of each whole table and of its slot variables."""
    for part in parts_of(holder):
        value = part.variable.read_value()
        if value.shape[0] != part.shape[0]:
            value = value[part.first_row : part.first_row + part.shape[0]]
        yield part.key, value


def note(folder: str, world_size: int, holders: Sequence[Holder]) -> str:
    """The checkpoint's note on the files that several ranks wrote beside it."""
    slots = any("." in part.key for holder in holders for part in parts_of(holder))
    return json.dumps({"folder": folder, "world_size": world_size, "slots": slots})


def write(folder: str, rank: int, world_size: int, ids: Sequence[str], holders: Any) -> None:
    """Writes this rank's file of the holders' parts; `ids` are the same on all ranks."""
    with flushed(file_of(folder, rank, world_size)) as opened:
        with zipfile.ZipFile(opened, "w") as archive:
            for holder_id, holder in zip(ids, holders, strict=True):
                for part in parts_of(holder):
                    _write_part(archive, holder_id, part)


@contextlib.contextmanager
def flushed(file: pathlib.Path) -> Iterator[BinaryIO]:
    """A scope that writes a file, and flushes it to the disk; an OSError names the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from error


def file_of(folder: str, rank: int, world_size: int) -> pathlib.Path:
    """The path of one rank's file."""
    return pathlib.Path(folder) / f"{rank}-of-{world_size}.npz"


def blocks_of(part: Part) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of each block; bounds are the same on all ranks."""
    step = max(1, BLOCK_BYTES // (4 * part.shape[1]))
    start, end = part.rows
    while start < end:
        stop = min(end, (start // step + 1) * step)
        yield start, stop
        start = stop


def _write_part(archive, holder_id, part):
    for start, stop in blocks_of(part) if part.written else ():
        offset = part.first_row - part.rows[0]
        block = tf.gather(part.variable, tf.range(start + offset, stop + offset))
        block = tf.cast(block, tf.float32) if block.dtype == tf.bfloat16 else block
        name = ",".join(map(str, (holder_id, part.key, *part.shape, start, stop, *part.columns)))
        with archive.open(f"{name}.npy", "w", force_zip64=True) as opened:
            np.lib.format.write_array(opened, block.numpy(), allow_pickle=False)


# ---- reading ----


def note_of(path: str) -> dict | None:
    """The note of a checkpoint on its dense tables; None if it has none."""
    reader = tf.train.load_checkpoint(path)
    return json.loads(reader.get_tensor(KEY)) if reader.has_tensor(KEY) else None


def unreached(objects: Sequence[Any], variables: Sequence[Any]) -> list[str]:
    """Names of holders that own one of the variables but are not among the objects."""
    reached, known = {id(each) for each in objects}, {id(each) for each in variables}
    return [
        holder.name
        for holder in list(_holders)
        if id(holder) not in reached and known & {id(v) for v in holder.own_variables()}
    ]


def parts_to_read(holders: Sequence[Holder]) -> list[tuple[Holder, list[Part]]]:
    """The holders that the checkpoint being read contains, each with its parts."""
    return [(holder, parts_of(holder)) for holder in holders if holder.read_as is not None]
