"""Writes the tables of a model into the parts of a SavedModel: no rank holds a whole table.

    keys    every rank =keys=> the rank that places them (`Layout.ranks_of`) puts them into buckets
    rows    that rank =some keys=> the ranks that own them =rows=> it writes index and rows

A rank needs memory for its share of the index of one table, and about 30 bytes for each key in it
while it places them. Rows take a few times `contents.CHUNK_BYTES` in transit.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from sok_like.lookup import buckets
from sok_like.lookup.buckets import SLOTS, Buckets
from sok_like.lookup.placement import Placement
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable, encoded, number_dtype
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.serving import contents
from sok_like.serving.parts import Parts, Rows, Slice, key_of
from sok_like.table import ownership, table_reader
from sok_like.table.variable import EmbeddingVariable

_LEAST_ROOM = 1024  # keys, beside the headroom


class Written(NamedTuple):
    """A table of the SavedModel."""

    stock: StockTable
    placement: Placement | None  # of this rank's keys, if it can be refreshed and has an index
    now: int  # the number of the instant, for `contents.changes`; 0: it records no changes


def attribute_of(number: int, part: str) -> str:
    """The attribute by which a module must hold a large variable of a table."""
    # No path in the module is shorter, so it is the variable's key in the checkpoint.
    return f"table_{number}_{part}"


class Wanted(NamedTuple):
    """What the tables of a SavedModel are to be."""

    row_dtype: str
    initial: bool  # whether missing keys read their initial row
    headroom: float | None = None  # room for new keys, as a fraction, if it can be refreshed


def write(variable: EmbeddingVariable, number: int, parts: Parts, wanted: Wanted) -> Written:
    """Writes one table, with its number in the model; every rank must call it."""
    communicator, follows = comm.current(), wanted.headroom is not None
    name = _call(variable)
    instants, keys, written = [], [], []

    def read():
        handed = int(variable.register_for_read(with_slots=False))
        with contextlib.closing(table_reader.TableReader(handed, 0 if follows else None)) as stream:
            instants.append(stream.instant)
            keys.append(np.zeros([0], np.int64) if variable.key_limit else stream.keys())
        return len(keys[0])

    counts = agreed(read, communicator, name, ValueError)
    share = _share(variable, keys.pop(), counts, wanted.headroom)

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
        written.append(Written(stock, placement, instants[0]))

    agreed(prepare, communicator, name, ValueError)
    _write(variable, number, parts, share, written[0])
    return written[0]


def _call(variable):
    return f"export of table '{variable.table_name}'"


class _Share(NamedTuple):
    """The rows that this rank writes: some with keys, and then rows of zeros."""

    num_rows: int  # of all ranks
    begin: int
    size: int  # with keys
    capacity: int
    placed: Buckets | None = None


def _share(variable, keys, counts, headroom):
    """This rank's share of the rows, from its own keys and the number of keys of each rank."""
    communicator, placed = comm.current(), None
    ranks = range(communicator.world_size)
    if variable.key_limit:
        ends = [variable.key_limit * (rank + 1) // len(ranks) for rank in ranks]
        sizes = capacities = np.diff([0, *ends])
    else:
        name, total = _call(variable), sum(counts)
        room = total if headroom is None else _LEAST_ROOM + int(total * (1 + headroom))
        placed = _placed(keys, room, name, max(counts))
        del keys
        sizes = np.array(agreed(lambda: placed.num_keys, communicator, name))
        ends = [placed.layout.range_of(rank, len(ranks))[1] for rank in ranks]
        spare = (room - total) * np.array([0, *ends]) // placed.layout.num_buckets
        capacities = sizes + np.diff(spare)
    if not capacities.any():  # a gather needs a row
        capacities = (np.arange(len(ranks)) == 0).astype(np.int64)
    rank = communicator.rank
    begin, capacity = int(capacities[:rank].sum()), int(capacities[rank])
    return _Share(int(capacities.sum()), begin, int(sizes[rank]), capacity, placed)


def _write(variable, number, parts, share, written):
    """Writes this rank's share: rows with keys, the index, and rows of zeros."""
    name = _call(variable)
    (stock, placement, _), placed, begin = written, share.placed, share.begin
    shapes = {part: variable.shape for part, variable in stock.large().items()}

    def slice_of(part, at, value):
        return Slice(key_of(attribute_of(number, part)), shapes[part], [at], value)

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
        own_keys = keys
        if world_size > 1:
            chunks = (keys[at : at + step] for at in range(0, max(1, most), step))
            own_keys = np.concatenate(
                [
                    contents.to_ranks(chunk, layout.ranks_of(chunk, world_size), name)[0]
                    for chunk in chunks
                ]
            )
        placed: list[Any] = []

        def place():
            bounds = layout.range_of(rank, world_size)  # noqa: B023
            placed.append(buckets.place(own_keys, layout, *bounds))  # noqa: B023
            return placed[0] is not None  # noqa: B023

        if all(agreed(place, communicator, name, ValueError)):
            return placed[0]
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
    own_rows: list[Any] = []

    def find():
        rows, present = variable.find(asked)
        if not variable.key_limit and not present.numpy().all():
            raise ValueError(
                f"A table must not change while it is exported. Received: keys of table "
                f"'{variable.table_name}' that are gone"
            )
        own_rows.append(rows.numpy())

    agreed(find, communicator, name, ValueError)
    return answer(own_rows[0])
