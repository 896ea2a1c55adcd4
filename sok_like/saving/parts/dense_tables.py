"""What ranks hold of their own besides hash tables: slices of dense tables, other variables.

    model.ckpt                                the rest, and the name of each holder
    model.ckpt.tables/dense.3f2a/0-of-2.npz   the slices of rank 0, a block of rows at a time
    model.ckpt.tables/ranks.3f2a/1-of-2.npz   variables of rank 1, by their keys in the checkpoint

A holder, such as a layer of `dist_model_parallel`, says which rows and columns of which whole
tables lie on this rank, and the same for slot variables. A reader takes its own slices out of the
blocks of all files, on any number of ranks. Other variables need the number that wrote them.

TensorFlow and Keras know an optimizer's variables by their positions in lists, which would differ
between ranks. So the lists that they see do not contain the holders' variables: a holder stores
them with its tables.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes, view
from sok_like.runtime.ranks import comm
from sok_like.saving.format import array_files, durable
from sok_like.saving.parts import table_names
from sok_like.saving.parts.checkpointable import CheckpointPart, StagedContent
from sok_like.table.slices import HeldSlice, TableSlice

BLOCK_BYTES = 8 * 2**20
_state = threading.local()  # .optimizers: of `of_root`
_holders: weakref.WeakSet = weakref.WeakSet()


class DenseSlice(NamedTuple):
    """This rank's slice of a whole table, or of one of its slot variables."""

    key: str  # "<table>" or "<table>.<slot variable>", by `table_names.key_of`
    shape: tuple[int, int]  # of the whole table
    held: HeldSlice
    written: bool  # False if another rank writes the same slice

    def blocks(self) -> Iterator[TableSlice]:
        """Its rows, some megabytes at a time; bounds are the same on all ranks."""
        return self.held.place.by_rows(max(1, BLOCK_BYTES // (4 * self.shape[1])))


# An object that holds dense tables, and that `tf.train.Checkpoint` sees as a Trackable: a
# `DenseTables` of `sok_like/dist_model_parallel/dense_tables.py`.
Holder = Any


def parts_of(holder: Holder) -> list[DenseSlice]:
    """The holder's parts on this rank, with slot variables of the optimizers in scope."""
    return holder.dense_parts(getattr(_state, "optimizers", ()))


def wholes_of(holder: Holder) -> Iterator[tuple[str, Any]]:
    """On one rank: the key and value of each whole table and of its slot variables."""
    for part in parts_of(holder):
        value = part.held.variable.read_value()
        if value.shape[0] != part.shape[0]:
            value = part.held.read(part.held.place)
        yield part.key, value


class ArraysPart(CheckpointPart):
    """Arrays that each rank writes into a file of its own: `arrays` yields them with names."""

    def __init__(self, name: str, arrays: Callable[[], Iterable[tuple[str, array_files.Unread]]]):
        self.name, self._arrays = name, arrays
        self._entry: Any = None

    def write(self) -> Any:
        if self._entry is None:  # else it is written already, before the other parts of a save
            here, arrays = comm.current(), dict(self._arrays())
            self._entry = array_files.write(self.folder, here.rank, here.world_size, arrays)
        return self._entry

    def finish(self, entries: Sequence[dict[str, Any]]) -> None:
        array_files.finish(self.folder, entries)


def rank_variables(values: Callable[[], Iterable[tuple[str, Any]]]) -> ArraysPart:
    """Variables of which each rank has its own values: `values` yields their keys and values."""

    def arrays():
        for key, tensor in values():
            value = tf.convert_to_tensor(tensor)
            dtype = value.dtype.as_numpy_dtype
            yield key, array_files.Unread(tuple(value.shape), dtype, value.numpy)

    return ArraysPart("ranks", arrays)


def dense_tables(name: str, holders: Sequence[Holder], ids: Sequence[str]) -> ArraysPart:
    """Dense tables of holders, which all ranks list alike; `ids` are those in files."""

    def arrays():
        for holder_id, holder in zip(ids, holders, strict=True):
            for part in parts_of(holder):
                for place in part.blocks() if part.written else ():
                    bounds = itertools.chain(*zip(*place, strict=True))  # of rows, then of columns
                    name = holder_id, part.key, *part.shape, *bounds
                    dtype = part.held.variable.dtype.as_numpy_dtype
                    dtype = np.float32 if dtype == tf.bfloat16.as_numpy_dtype else dtype
                    read = functools.partial(part.held.read, place)
                    yield ",".join(map(str, name)), array_files.Unread(place.shape, dtype, read)

    return ArraysPart(name, arrays)


def match(holder: Holder, tables: Sequence[str], file: str) -> tuple[dict[str, str], str]:
    """The holder's key of each table, by that in a file; and what one side lacks, or ""."""
    of_holder, of_file = list(holder.shapes()), sorted(tables, key=table_names.order)
    expected, received = ([*map(table_names.name_of, keys)] for keys in (of_holder, of_file))
    pairs, problem = table_names.matched(holder.name, expected, received, file)
    return {of_file[place]: of_holder[i] for i, place in pairs}, problem


class _Block(NamedTuple):
    """An array of a file, which is a slice of a whole table."""

    place: TableSlice
    name: Any  # in its file
    rank: int  # that has written it


# By part's key: the shape of a whole table, and its blocks.
_Stored = dict[str, tuple[tuple[int, int], list[_Block]]]
# Yields the blocks that it is given, each with its value.
_ReadBlocks = Callable[[Iterable[_Block]], Iterator[tuple[_Block, np.ndarray]]]


class StoredTables:
    """The dense tables of a holder in one save."""

    def __init__(self, stored: _Stored, read: _ReadBlocks, identity: str = ""):
        self._stored, self._read, self._identity = stored, read, identity

    @classmethod
    def of_slices(cls, slices: Mapping[str, tuple]) -> StoredTables:
        """Of slices inside a file: each has the whole's shape, its place, and how it is read."""
        stored = {
            key: (shape, [_Block(place, key, 0)]) for key, (shape, place, _) in slices.items()
        }
        return cls(stored, lambda blocks: ((b, slices[b.name][2]()) for b in blocks))

    def tables(self) -> list[str]:
        """The keys of the tables."""
        return [key for key in self._stored if "." not in key]

    def renumbered(self, keys: Mapping[str, str]) -> StoredTables:
        """The same with new keys of tables; those without one are left out."""
        stored = {}
        for key, value in self._stored.items():
            table, dot, slot = key.partition(".")
            if table in keys:
                stored[f"{keys[table]}{dot}{slot}"] = value
        return StoredTables(stored, self._read, self._identity)

    def slot_names(self) -> set[str]:
        """The names of slot variables."""
        return {key.partition(".")[2] for key in self._stored} - {""}

    def check(self, holder: Holder, parts: Sequence[DenseSlice]) -> None:
        """Raises ValueError unless tables have their shapes, and the holder's parts all rows."""
        shapes = holder.shapes()
        for key in sorted(self.tables()):  # checks all tables, so that ranks agree
            shape = tuple(self._stored[key][0])
            if shape != shapes[key]:
                required = f"have the tables of layer '{holder.name}' in their shapes"
                received = f"'{key}' of shape {shape} for a table of shape {shapes[key]}"
                raise durable.wrong("A checkpoint", required, received)
        parts = [part for part in parts if part.key.partition(".")[0] in self._stored]
        missing = sorted({part.key for part in parts} - {*self._stored})
        if missing and self.slot_names():
            required = f"have the optimizer's slot variables of layer '{holder.name}'"
            raise durable.wrong("A checkpoint", required, f"one without {missing}")
        for part in (each for each in parts if each.key in self._stored):
            place, (_, blocks) = part.held.place, self._stored[part.key]
            if sum(block.place.common(place).size for block in blocks) != place.size:
                raise ValueError(f"Rows of '{part.key}' of layer '{holder.name}' are missing.")

    def prepare(self, parts: Sequence[DenseSlice]) -> StagedContent:
        """Reads parts into memory."""
        values = []
        wanted: dict[_Block, list[Any]] = {}  # by block: what takes elements of it
        for part in (each for each in parts if each.key in self._stored):
            place, variable, _ = part.held
            value = np.empty(place.shape, variable.dtype.as_numpy_dtype)
            values.append((part, value))
            for block in self._stored[part.key][1]:
                common = block.place.common(place)
                if common.size:
                    wanted.setdefault(block, []).append((common, place, value))
        for block, array in self._read(wanted):
            array = array.reshape(block.place.shape)
            for common, place, value in wanted[block]:
                value[common.slices_in(place)] = array[common.slices_in(block.place)]

        def commit():
            for part, value in values:
                for block in part.blocks():
                    part.held.write(block, value[block.slices_in(part.held.place)])

        return StagedContent(commit, identity=self._identity)


NO_TABLES = StoredTables({}, lambda _: iter(()))


def read_folder(path: str, world_size: int) -> dict[str, StoredTables]:
    """The tables that `world_size` ranks have written into a folder, by their holder's id."""
    # Each rank compares the checksums of some files, so that together they compare all. The blocks
    # that a rank reads have a CRC-32 besides.
    folder, communicator = array_files.Folder(path, world_size), comm.current()
    folder.check(range(communicator.rank, world_size, communicator.world_size))
    stored: dict[str, _Stored] = {}
    for rank in range(world_size):
        with folder.open(rank) as archive:
            for name in archive.files:
                holder, key, *numbers = name.split(",")
                num_rows, num_columns, *bounds = map(int, numbers)
                of_holder = stored.setdefault(holder, {})
                blocks = of_holder.setdefault(key, ((num_rows, num_columns), []))[1]
                place = TableSlice(tuple(bounds[::2]), tuple(bounds[1::2]))
                blocks.append(_Block(place, name, rank))

    def read(wanted):
        blocks = list(wanted)
        for rank in sorted({block.rank for block in blocks}):
            with folder.open(rank) as archive:
                for block in blocks:
                    if block.rank == rank:
                        yield block, archive[block.name]

    return {
        holder: StoredTables(of_holder, read, folder.identity)
        for holder, of_holder in stored.items()
    }


# ---- variables of optimizers, without those of holders ----


def register(holder: Any) -> None:
    """From now on, optimizers keep the holder's variables out of checkpoints."""
    _holders.add(holder)


def unreached(objects: Sequence[Any], variables: Sequence[Any]) -> list[str]:
    """Names of holders that own one of the variables but are not among the objects."""
    reached, ids = set(map(id, objects)), set(map(id, variables))
    lost = [holder for holder in list(_holders) if id(holder) not in reached]
    return [holder.name for holder in lost if ids & set(map(id, holder.own_variables()))]


def children(own: Callable, self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`_trackable_children` of Keras' optimizers."""
    children = own(self, save_type, **kwargs)
    hidden = save_type == "checkpoint" and _hidden(self)
    if not hidden:
        return children
    lists = vars(self).setdefault("_sok_lists", {})
    tracked: dict[str, Any] = {n: c for n, c in children.items() if isinstance(c, list)}
    for name, wrapper in tracked.items():  # TensorFlow's, of a list
        items = wrapper._trackable_children()
        if items:
            children[name] = lists.setdefault(name, _Others())
            children[name].fill(items, hidden)
    return children


def save_or_load_optimizer(own: Callable, self: Any, store: Any) -> None:
    """`save_own_variables` and `load_own_variables` of Keras' optimizers."""
    if _hidden(self):  # Keras numbers the `variables` of what it is given
        cls = type(self)
        self = view(type(cls.__name__, (cls,), {"variables": ordinary(self)}), self)
        if not is_keras_3() and store.keys() and len(store.keys()) != len(self.variables):
            warnings.warn(  # tf_keras logs it
                f"The state of optimizer '{self.name}' is not loaded: the optimizer has "
                f"{len(self.variables)} variables, the file {len(store.keys())}",
                stacklevel=2,
            )
    own(self, store)


def ordinary(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that no holder stores."""
    hidden, variables = _hidden(optimizer), getattr(optimizer, "variables", ())
    # A method: of an optimizer that Keras' files do not hold. tf_keras' list is callable, too.
    variables = variables if isinstance(variables, (list, tuple)) else ()
    return [variable for variable in variables if id(variable) not in hidden]


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


def of_root(objects: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """A scope in which holders take their optimizers from these objects, to write or read."""
    return attributes(_state, {"optimizers": list(filter(is_optimizer, objects))})


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


def build_optimizers(objects: Sequence[Any]) -> None:
    """Makes the slot variables of the optimizers among the objects: list positions then agree."""
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
