"""Writes the tables of a model into the parts of a SavedModel: no rank holds a whole table.

    keys    every rank =keys=> the rank that places them (`Layout.ranks_of`) puts them into buckets
    rows    that rank =some keys=> the ranks that own them =rows=> it writes index and rows

A rank needs memory for its share of the index of one table, and about 30 bytes for each key in it
while it places them. Rows take a few times `contents.CHUNK_BYTES` in transit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.buckets import SLOTS, Buckets
from sok_like.lookup.placement import Placement
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable, encoded, number_dtype
from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.saving import streams
from sok_like.serving import contents
from sok_like.serving.parts import Parts, Rows, Slice, key_of
from sok_like.table import ownership
from sok_like.table.variable import EmbeddingVariable

_LEAST_ROOM = 1024  # keys, beside the headroom
_NO_KEYS: np.ndarray = np.zeros([0], np.int64)


class Written(NamedTuple):
    """A table of the SavedModel.

    Attributes:
        stock: The table.
        placement: Where this rank has placed keys, if the table can be refreshed and has an index.
        now: The number of the instant, for `contents.changes`; 0: the table records no changes.
    """

    stock: StockTable
    placement: Placement | None
    now: int


def large(tables: Sequence[StockTable]) -> dict[str, tf.Variable]:
    """The variables that `write` writes, by the attribute of the module that must hold them."""
    return {
        _name(number, part): variable
        for number, table in enumerate(tables)
        for part, variable in table.large().items()
    }


def _name(number, part):
    # No path in the module is shorter, so it is the variable's key in the checkpoint.
    return f"table_{number}_{part}"


class Wanted(NamedTuple):
    """What the tables of a SavedModel are to be.

    Attributes:
        row_dtype: One of `stock_table.ROW_DTYPES`.
        initial: Whether missing keys read their initial row.
        headroom: None, or the room for new keys in a table that can be refreshed, as a fraction of
            the keys.
    """

    row_dtype: str
    initial: bool
    headroom: float | None = None


def write(variable: EmbeddingVariable, number: int, parts: Parts, wanted: Wanted) -> Written:
    """Writes one table; every rank must call it.

    Args:
        number: Of the table in the model.

    Raises:
        ValueError: a rank cannot read or write, or int8 rows are not finite; on all ranks.
    """
    communicator, follows = comm.current(), wanted.headroom is not None
    name = _call(variable)
    found: list[Any] = []

    def read():
        handed = int(variable.hand_over(with_slots=False))
        with contextlib.closing(streams.Stream(handed, 0 if follows else None)) as stream:
            found.extend([stream.instant, _NO_KEYS if variable.key_limit else stream.keys()])
        return len(found[1])

    counts = agreed(read, communicator, name, ValueError)
    if variable.key_limit:
        share = _without_index(variable.key_limit)
    else:
        share = _with_index(found.pop(), counts, wanted.headroom, name)

    def prepare():
        layout = placement = None
        if share.placed is not None:
            layout = share.placed.layout
            if follows:
                kind = number_dtype(share.num_rows)
                placement = Placement(share.placed, share.begin, share.capacity, kind)
        missing = MissingRows(variable, wanted.initial, follows)
        dtype = wanted.row_dtype
        stock = StockTable(variable, layout, share.num_rows, dtype, missing, follows)
        found.append(Written(stock, placement, found[0]))

    agreed(prepare, communicator, name, ValueError)
    _write(variable, number, parts, share, found[-1])
    return found[-1]


def _call(variable):
    return f"export of table '{variable.table_name}'"


class _Share(NamedTuple):
    """The rows that this rank writes: some with keys, and then rows of zeros."""

    num_rows: int  # of all ranks
    begin: int
    size: int  # with keys
    capacity: int
    placed: Buckets | None = None


def _share(sizes, capacities, placed=None):
    """This rank's, of what the ranks have."""
    rank = comm.current().rank
    if not capacities.any():  # a gather needs a row
        capacities = (np.arange(len(capacities)) == 0).astype(np.int64)
    begin, capacity = int(capacities[:rank].sum()), int(capacities[rank])
    return _Share(int(capacities.sum()), begin, int(sizes[rank]), capacity, placed)


def _without_index(key_limit):
    world_size = comm.current().world_size
    sizes = np.diff([key_limit * each // world_size for each in range(world_size + 1)])
    return _share(sizes, sizes)


def _with_index(keys, counts, headroom, name):
    communicator, total = comm.current(), sum(counts)
    room = total if headroom is None else _LEAST_ROOM + int(total * (1 + headroom))
    placed = _placed(keys, room, name, max(counts))
    del keys
    sizes = np.array(agreed(lambda: placed.num_keys, communicator, name))
    ends = [placed.layout.range_of(each, len(sizes))[1] for each in range(len(sizes))]
    spare = (room - total) * np.array([0, *ends]) // placed.layout.num_buckets
    return _share(sizes, sizes + np.diff(spare), placed)


def _write(variable, number, parts, share, written):
    """Writes this rank's share: rows with keys, the index, and rows of zeros."""
    name = _call(variable)
    (stock, placement, _), placed, begin = written, share.placed, share.begin
    shapes = {part: each.shape for part, each in stock.large().items()}

    def slice_of(part, at, value):
        return Slice(key_of(_name(number, part)), shapes[part], [at], value)

    def rows_at(at, rows):
        coded = encoded(rows, stock.rows.dtype, stock.table_name)
        for part, value in zip(("rows", "scales"), coded, strict=False):
            yield slice_of(part, at, value)

    def zeros(at, end):
        return rows_at(begin + share.size + at, np.zeros([end - at, stock.dim], np.float32))

    def index(at, end):
        yield slice_of("keys", placed.begin + at, placed.keys[at:end])
        if placement is None:
            numbers = (begin + starts[at:end]).astype(number_dtype(share.num_rows))
            yield slice_of("starts", placed.begin + at, numbers)
        else:
            numbers = placement.numbers(at, end)
            yield slice_of("numbers", (placed.begin + at) * SLOTS, numbers)

    def keys_at(at, end):
        if placed is None:
            return np.arange(begin + at, begin + min(end, share.size))
        return placed.keys[at:end][np.arange(SLOTS) < placed.counts[at:end, np.newaxis]]

    step = contents.CHUNK_BYTES // (8 + 4 * stock.dim)
    if variable.home is not None:  # which all ask at once
        step //= comm.current().world_size
    step = max(1, step if placed is None else step // SLOTS)
    starts: Any = range(share.size) if placed is None else placed.starts()
    for at in range(0, max(agreed(lambda: len(starts), comm.current(), name)), step):
        rows = _rows(variable, keys_at(at, at + step), name)
        parts.write(lambda: rows_at(begin + int(starts[at]), rows) if len(rows) else ())  # noqa: B023
    spare = Rows(share.capacity - share.size, 4 * stock.dim, zeros)
    parts.write_rows([spare] if placed is None else [Rows(len(starts), 12 * SLOTS, index), spare])


def _placed(keys, room, name, most) -> Buckets:
    """This rank's buckets, of the keys of all ranks; `most` is the most keys of one of them."""
    communicator = comm.current()
    rank, world_size = communicator.rank, communicator.world_size
    step = contents.CHUNK_BYTES // 8
    for attempt in range(buckets.TRIES):
        layout = buckets.layout_for(room, attempt)
        mine = keys
        if world_size > 1:
            chunks = (keys[at : at + step] for at in range(0, max(1, most), step))
            received = [
                contents.to_ranks(each, layout.ranks_of(each, world_size), name)[0]
                for each in chunks
            ]
            mine = np.concatenate(received)
            del received
        made: list[Any] = []

        def run():
            made.append(buckets.place(mine, layout, *layout.range_of(rank, world_size)))  # noqa: B023
            return made[0] is not None  # noqa: B023

        if all(agreed(run, communicator, name, ValueError)):
            return made[0]
    raise RuntimeError(
        f"{room} keys found no place in {layout.num_buckets} buckets of {SLOTS}, with any of "
        f"{buckets.TRIES} salts."
    )


def _rows(variable, keys, name):
    """The rows of keys that any rank owns, float32 `[num_keys, dim]`; every rank must call it."""
    communicator = comm.current()
    owners = ownership.owners(keys, communicator.world_size)
    if variable.home is not None:
        owners[:] = variable.home % communicator.world_size
    asked, answer = contents.to_ranks(keys, owners, name)
    found: list[Any] = []

    def find():
        rows, present = variable.find(asked)
        if not variable.key_limit and not present.numpy().all():
            raise ValueError(
                f"A table must not change while it is exported. Received: keys of table "
                f"'{variable.table_name}' that are gone"
            )
        found.append(rows.numpy())

    agreed(find, communicator, name, ValueError)
    return answer(found[0])
