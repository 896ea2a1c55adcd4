"""Writes the tables of a model into the parts of a SavedModel: no rank holds a whole table.

    keys    every rank =keys=> the rank that places them (`Layout.ranks_of`) puts them into buckets
    rows    that rank =some keys=> the ranks that own them =rows=> it writes index and rows

A rank needs memory for its share of the index of one table, and about 30 bytes for each key in it
while it places them. Rows take a few times `contents.CHUNK_BYTES` in transit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
from sok_like.serving.parts import Parts, Slice, key_of
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


class _Piece(NamedTuple):
    """What a rank writes at once: the rows of some keys, and then rows of zeros."""

    keys: np.ndarray = _NO_KEYS
    first_row: int = 0
    zeros: int = 0
    items: Sequence[tuple[str, int, np.ndarray]] = ()  # of the index: variable, number, items


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
    communicator, headroom = comm.current(), wanted.headroom
    rank, world_size, follows = communicator.rank, communicator.world_size, headroom is not None
    name = f"export of table '{variable.table_name}'"
    found: list[Any] = []

    def read():
        handed = int(variable.hand_over(with_slots=False))
        with contextlib.closing(streams.Stream(handed, 0 if follows else None)) as stream:
            found.extend([_NO_KEYS if variable.key_limit else stream.keys(), stream.instant])
        return len(found[0])

    counts = agreed(read, communicator, name, ValueError)
    room = sum(counts) if headroom is None else _LEAST_ROOM + int(sum(counts) * (1 + headroom))
    placed = None
    sizes: np.ndarray  # keys by rank, and rows by rank
    capacities: np.ndarray
    if variable.key_limit:
        bounds = [variable.key_limit * each // world_size for each in range(world_size + 1)]
        sizes = capacities = np.diff(bounds)
    else:
        placed = _placed(found.pop(0), room, name, max(counts))
        sizes = np.array(agreed(lambda: placed.num_keys, communicator, name))
        ends = [placed.layout.range_of(each, world_size)[1] for each in range(world_size)]
        spare = (room - sum(counts)) * np.array([0, *ends]) // placed.layout.num_buckets
        capacities = sizes + np.diff(spare)
    num_rows = int(capacities.sum())
    if not num_rows:  # a gather needs a row
        capacities, num_rows = np.arange(world_size) == 0, 1
    begin, kind = int(capacities[:rank].sum()), number_dtype(num_rows)
    made: list[Any] = []

    def prepare():
        layout = placement = None
        if placed is not None:
            layout = placed.layout
            if follows:
                placement = Placement(placed, begin, int(capacities[rank]), kind)
        missing = MissingRows(variable, wanted.initial, follows)
        stock = StockTable(variable, layout, num_rows, wanted.row_dtype, missing, follows)
        made.extend([stock, placement])

    agreed(prepare, communicator, name, ValueError)
    stock, placement = made
    step = max(SLOTS, contents.CHUNK_BYTES // (8 + 4 * variable.dim))
    if variable.home is not None:  # which all ask at once
        step = max(SLOTS, step // world_size)

    def pieces():
        end = begin + int(sizes[rank])
        if placed is not None:
            yield from _of_buckets(placed, placement, begin, step, kind)
        else:
            for at in range(begin, end, step):
                yield _Piece(np.arange(at, min(end, at + step)), at)
        last = begin + int(capacities[rank])
        for at in range(end, last, step):
            yield _Piece(_NO_KEYS, at, min(step, last - at))

    left, piece = pieces(), [_Piece()]

    def advance():
        following = next(left, None)
        piece[0] = following or _Piece()
        return following is not None

    while any(agreed(advance, communicator, name, ValueError)):
        _write(stock, number, parts, piece[0], _rows(variable, piece[0].keys, name))
    return Written(stock, placement, found[-1])


def _write(stock, number, parts, piece, rows):
    shapes = {part: each.shape for part, each in stock.large().items()}

    def slices():
        if piece.zeros:
            yield from of_rows(np.zeros([piece.zeros, stock.dim], np.float32))
        if len(rows):
            yield from of_rows(rows)
        for part, at, items in piece.items:
            yield Slice(key_of(_name(number, part)), shapes[part], [at], items)

    def of_rows(values):
        coded = encoded(values, stock.rows.dtype, stock.table_name)
        for part, value in zip(("rows", "scales"), coded, strict=False):
            yield Slice(key_of(_name(number, part)), shapes[part], [piece.first_row], value)

    parts.write(slices)


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


def _of_buckets(placed, placement, first_row, step, kind) -> Iterator[_Piece]:
    starts = first_row + placed.starts()
    for at in range(0, len(starts), step // SLOTS):
        part = slice(at, at + step // SLOTS)
        keys, begin = placed.keys[part], placed.begin + at
        if placement is None:
            rows = "starts", begin, starts[part].astype(kind)
        else:
            rows = "numbers", begin * SLOTS, placement.numbers(part.start, part.stop)
        mine = keys[placed.is_taken[part]]
        yield _Piece(mine, int(starts[at]), 0, [("keys", begin, keys), rows])


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
