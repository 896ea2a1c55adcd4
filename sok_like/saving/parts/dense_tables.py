"""What ranks hold of their own besides hash tables: slices of dense tables, other variables.

    model.ckpt                                the rest, and the name of each holder
    model.ckpt.tables/dense.3f2a/0-of-2.npz   the slices of rank 0, a block of rows at a time
    model.ckpt.tables/ranks.3f2a/1-of-2.npz   variables of rank 1, by their keys in the checkpoint

A holder, such as a layer of `dist_model_parallel`, says which rows and columns of which whole
tables lie on this rank, and the same for slot variables. A reader takes its own slices out of the
blocks of all files, on any number of ranks. Other variables need the number that wrote them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.saving.format import array_files, durable
from sok_like.saving.format.array_files import Folder
from sok_like.saving.parts import optimizer_variables, table_names
from sok_like.saving.parts.checkpointable import CheckpointPart, StagedContent
from sok_like.table.slices import HeldSlice, TableSlice

BLOCK_BYTES = 8 * 2**20


class DenseSlice(NamedTuple):
    """This rank's slice of a whole table, or of one of its slot variables."""

    key: str  # "<table>" or "<table>.<slot variable>", by `table_names.key_of`
    shape: tuple[int, int]  # of the whole table
    held: HeldSlice
    written: bool  # False if another rank writes the same slice

    def blocks(self) -> Iterator[TableSlice]:
        """Its rows, some megabytes at a time; bounds are the same on all ranks."""
        return self.held.place.by_rows(max(1, BLOCK_BYTES // (4 * self.shape[1])))


class Holder(Protocol):
    """An object that holds dense tables; `tf.train.Checkpoint` sees it as a Trackable."""

    name: str  # for errors
    table_name: str  # names a folder beside a file
    id: str  # in files; unique within a process

    def dense_parts(self, optimizers: Sequence[Any]) -> list[DenseSlice]:
        """The parts of this rank, with their slot variables in these optimizers."""

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the whole tables by key, including those of which this rank has no part."""

    def own_variables(self) -> list[Any]:
        """This rank's variables."""

    def variables_in(self, optimizer: Any) -> list[Any]:
        """The holder's variables that an optimizer knows, and their slot variables."""


def parts_of(holder: Holder) -> list[DenseSlice]:
    """The holder's parts on this rank, with slot variables of the optimizers in scope."""
    return holder.dense_parts(optimizer_variables.in_scope())


def wholes_of(holder: Holder) -> Iterator[tuple[str, Any]]:
    """On one rank: the key and value of each whole table and of its slot variables."""
    for part in parts_of(holder):
        value = part.held.variable.read_value()
        if value.shape[0] != part.shape[0]:
            value = part.held.read(part.held.place)
        yield part.key, value


class _ArraysPart(CheckpointPart):
    """A part whose arrays each rank writes into a file of arrays."""

    def _arrays(self) -> Iterator[tuple[str, array_files.Unread]]:
        """This rank's arrays, by name."""
        raise NotImplementedError

    def write(self) -> dict[str, Any]:
        here = comm.current()
        return array_files.write(self.folder, here.rank, here.world_size, dict(self._arrays()))

    def finish(self, entries: Sequence[dict[str, Any]]) -> None:
        array_files.finish(self.folder, entries)


class RankVariables(_ArraysPart):
    """Variables of which each rank has its own values: `values` yields their keys and values."""

    name = "ranks"

    def __init__(self, values: Callable[[], Iterable[tuple[str, Any]]]):
        self._values = values

    def _arrays(self):
        for key, tensor in self._values():
            value = tf.convert_to_tensor(tensor)
            dtype = value.dtype.as_numpy_dtype
            yield key, array_files.Unread(tuple(value.shape), dtype, value.numpy)


def read_rank_variables(folder: str, world_size: int, listed: bool) -> dict[str, np.ndarray]:
    """The values of this rank, by key."""
    files, rank = Folder(folder, world_size, listed), comm.current().rank
    files.check([rank])
    with files.open(rank) as archive:
        return {key: archive[key] for key in archive.files}


class DenseTablesPart(_ArraysPart):
    """Dense tables of holders, which all ranks list alike; `ids` are those in files."""

    def __init__(self, name: str, holders: Sequence[Holder], ids: Sequence[str]):
        self.name, self._holders, self._ids = name, list(holders), list(ids)

    def _arrays(self):
        for holder_id, holder in zip(self._ids, self._holders, strict=True):
            for part in parts_of(holder):
                for place in part.blocks() if part.written else ():
                    bounds = itertools.chain(*zip(*place, strict=True))  # of rows, then of columns
                    name = holder_id, part.key, *part.shape, *bounds
                    dtype = part.held.variable.dtype.as_numpy_dtype
                    dtype = np.float32 if dtype == tf.bfloat16.as_numpy_dtype else dtype
                    read = functools.partial(_read, part.held, place, dtype)
                    yield ",".join(map(str, name)), array_files.Unread(place.shape, dtype, read)


def _read(held, place, dtype):
    return tf.cast(held.read(place), dtype).numpy()


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


# By holder's id and part's key: the shape of a whole table, and its blocks.
_Stored = dict[tuple[str, str], tuple[tuple[int, int], list[_Block]]]
# Yields the blocks that it is given, each with its value.
_ReadBlocks = Callable[[Iterable[_Block]], Iterator[tuple[_Block, np.ndarray]]]


class StoredTables:
    """The dense tables of one save."""

    def __init__(self, stored: _Stored, arrays: _ReadBlocks, identity: str = ""):
        self._stored, self._arrays, self.identity = stored, arrays, identity

    @classmethod
    def of_folder(cls, path: str, world_size: int, listed: bool) -> StoredTables:
        """Of a folder that `world_size` ranks have written."""
        # Each rank compares the checksums of some files, so that together they compare all. The
        # blocks that a rank reads have a CRC-32 besides.
        folder, communicator = Folder(path, world_size, listed), comm.current()
        folder.check(range(communicator.rank, world_size, communicator.world_size))
        stored: _Stored = {}
        for rank in range(world_size):
            with folder.open(rank) as archive:
                for name in archive.files:
                    holder, key, *numbers = name.split(",")
                    num_rows, num_columns, *bounds = map(int, numbers)
                    blocks = stored.setdefault((holder, key), ((num_rows, num_columns), []))[1]
                    place = TableSlice(tuple(bounds[::2]), tuple(bounds[1::2]))
                    blocks.append(_Block(place, name, rank))

        def arrays(blocks):
            blocks = list(blocks)
            for rank in sorted({block.rank for block in blocks}):
                with folder.open(rank) as archive:
                    for block in blocks:
                        if block.rank == rank:
                            yield block, archive[block.name]

        return cls(stored, arrays, folder.identity)

    @classmethod
    def of_slices(cls, slices: Mapping[tuple[str, str], tuple]) -> StoredTables:
        """Of slices inside a file: each has the whole's shape, its place, and how it is read."""
        stored = {
            name: (shape, [_Block(place, name, 0)]) for name, (shape, place, _) in slices.items()
        }
        return cls(stored, lambda blocks: ((b, slices[b.name][2]()) for b in blocks))

    def tables(self, read_as: str) -> list[str]:
        """The keys of a holder's tables; `read_as` is its id in the save."""
        return [key for name, key in self._stored if name == read_as and "." not in key]

    def renumbered(self, read_as: str, keys: Mapping[str, str]) -> StoredTables:
        """The same with new keys of a holder's tables; those without one are left out."""
        stored = {}
        for (name, key), value in self._stored.items():
            table, dot, slot = key.partition(".")
            if name != read_as or table in keys:
                stored[name, f"{keys[table]}{dot}{slot}" if name == read_as else key] = value
        return StoredTables(stored, self._arrays, self.identity)

    def slot_names(self, read_as: str) -> set[str]:
        """The names of the holder's slot variables in the save."""
        names = {key.partition(".")[2] for name, key in self._stored if name == read_as}
        return names - {""}

    def check_tables(self, holder: Holder, read_as: str, parts: Sequence[DenseSlice]) -> None:
        """Raises ValueError unless a holder's tables have their shapes, and its parts all rows."""
        for key in sorted(self.tables(read_as)):  # checks all tables, so that ranks agree
            shape, expected = tuple(self._stored[read_as, key][0]), holder.shapes()[key]
            if shape != expected:
                required = f"have the tables of layer '{holder.name}' in their shapes"
                received = f"'{key}' of shape {shape} for a table of shape {expected}"
                raise durable.wrong("A checkpoint", required, received)
        self._check_parts(holder, read_as, [part for part in parts if "." not in part.key])

    def check_slots(self, holder: Holder, read_as: str, parts: Sequence[DenseSlice]) -> None:
        """Raises ValueError if the save has slot variables, but not all of those of the parts."""
        slots = [part for part in parts if "." in part.key]
        slots = [part for part in slots if part.key.partition(".")[0] in self.tables(read_as)]
        missing = sorted({part.key for part in slots if (read_as, part.key) not in self._stored})
        names = self.slot_names(read_as)
        if missing and names:
            required = f"have the optimizer's slot variables of layer '{holder.name}'"
            raise durable.wrong("A checkpoint", required, f"one without {missing}")
        self._check_parts(holder, read_as, slots if names else ())

    def _check_parts(self, holder, read_as, parts):
        for part in parts:
            if (read_as, part.key) not in self._stored:  # of a table that the file lacks
                continue
            place, (_, blocks) = part.held.place, self._stored[read_as, part.key]
            if sum(block.place.common(place).size for block in blocks) != place.size:
                raise ValueError(f"Rows of '{part.key}' of layer '{holder.name}' are missing.")

    def prepare(self, read_as: str, parts: Sequence[DenseSlice]) -> StagedContent:
        """Reads parts into memory; `read_as` is their holder's id in the save."""
        values = []
        wanted: dict[_Block, list[Any]] = {}  # by block: what takes elements of it
        for part in parts:
            if (read_as, part.key) not in self._stored:
                continue
            blocks, (place, variable, _) = self._stored[read_as, part.key][1], part.held
            value = np.empty(place.shape, variable.dtype.as_numpy_dtype)
            values.append((part, value))
            for block in blocks:
                common = block.place.common(place)
                if common.size:
                    wanted.setdefault(block, []).append((common, place, value))
        for block, array in self._arrays(wanted):
            array = array.reshape(block.place.shape)
            for common, place, value in wanted[block]:
                value[common.slices_in(place)] = array[common.slices_in(block.place)]

        def commit():
            for part, value in values:
                for block in part.blocks():
                    part.held.write(block, value[block.slices_in(part.held.place)])

        return StagedContent(commit, identity=self.identity)
