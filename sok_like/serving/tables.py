"""Writes the tables of a model into the parts of a SavedModel: no rank holds a whole table.

    sizes   every rank counts its keys, so all know how large the variables are
    keys    every rank =keys=> the rank that places them (`Layout.ranks_of`) puts them into buckets
    rows    that rank =some keys=> the ranks that own them =rows=> it writes index and rows

Keys and rows are those of one table after the other. A rank needs memory for its share of the index
of one table, and about 30 bytes for each key in it while it places them. Rows take a few times
`contents.CHUNK_BYTES` in transit.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_like.lookup import buckets
from sok_like.lookup.buckets import SLOTS, Buckets, Placement
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable, StockTables, encoded
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none
from sok_like.serving import contents
from sok_like.serving.parts import Parts, Rows, Slice, key_of
from sok_like.table import keys as table_keys
from sok_like.table import table_reader
from sok_like.table.variable import EmbeddingVariable

_LEAST_ROOM = 1024  # keys, beside the headroom


def attribute_of(part: str) -> str:
    """The attribute by which a module must hold a large variable of the tables."""
    # No path in the module is shorter, so it is the variable's key in the checkpoint.
    return f"tables_{part}"


def write(
    variables: Sequence[EmbeddingVariable],
    parts: Parts,
    row_dtype: str,
    missing: str,
    headroom: Any,
) -> tuple[StockTables, list[Placement | None], list[int]]:
    """Writes the tables of a model; every rank must call it. `headroom` None: for no refreshes.

    Returns the tables of the SavedModel, and of each variable the placement of this rank's keys
    (None without refreshes or an index) and its instant for `contents.changes`.
    """
    follows = headroom is not None
    rooms = [_room(variable, headroom) for variable in variables]

    def prepare():
        tables = []
        for variable, room in zip(variables, rooms, strict=True):
            missing_rows = MissingRows(variable, missing == "initial")
            layout = None if variable.key_limit else buckets.layout_for(room.size)
            tables.append(StockTable(variable, max(1, room.size), missing_rows, layout))
        return StockTables(tables, row_dtype, follows)

    stock = all_or_none(prepare, comm.current())
    placements: list[Placement | None] = []
    instants = []
    for variable, room, table in zip(variables, rooms, stock.tables, strict=True):
        keys, instant = _keys(variable, room, follows)
        share = _share(variable, table, keys, room)
        del keys
        if follows and share.placed is not None:
            first_row, kind = table.first_row + share.begin, stock.number_dtype
            placement = Placement(share.placed, first_row, share.capacity, kind)
            share = share._replace(placement=placement)
        placements.append(share.placement)
        instants.append(instant)
        _write(variable, table, share, stock, parts)
    return stock, placements, instants


def _call(variable):
    return f"export of table '{variable.table_name}'"


class _Room(NamedTuple):
    """Of a table on all ranks."""

    size: int  # rows
    counts: list[int]  # of keys, by rank


def _room(variable, headroom):
    def count():
        if headroom is not None and variable.keeps_records:
            variable.evict()  # the instant at which deltas begin would do it
        return int(variable.size())

    counts = agreed(count, comm.current(), _call(variable), ValueError)
    if variable.key_limit:
        return _Room(variable.key_limit, counts)
    total = sum(counts)
    room = total if headroom is None else _LEAST_ROOM + int(total * (1 + headroom))
    return _Room(room, counts)


def _keys(variable, room, follows):
    """This rank's keys, and their instant."""

    def read():
        number = int(variable.register_for_read(with_slots=False))
        with contextlib.closing(table_reader.TableReader(number, 0 if follows else None)) as stream:
            keys = np.zeros([0], np.int64) if variable.key_limit else stream.keys()
            instant = stream.instant
        if not variable.key_limit and len(keys) != room.counts[comm.current().rank]:
            raise _has_changed(variable, "another number of keys")
        return keys, instant

    return all_or_none(read, comm.current(), _call(variable))


def _has_changed(variable, what):
    return ValueError(
        f"A table must not change while it is exported. Received: {what} of table "
        f"'{variable.table_name}'"
    )


class _Share(NamedTuple):
    """The rows of a table that this rank writes: some with keys, and then rows of zeros."""

    begin: int
    size: int  # with keys
    capacity: int
    placed: Buckets | None = None
    placement: Placement | None = None  # if the table can be refreshed


def _share(variable, table, keys, room):
    """This rank's share of the rows; sets the salt of the table's layout."""
    communicator, placed = comm.current(), None
    ranks = range(communicator.world_size)
    if variable.key_limit:
        ends = [variable.key_limit * (rank + 1) // len(ranks) for rank in ranks]
        sizes = capacities = np.diff([0, *ends])
    else:
        name, total = _call(variable), sum(room.counts)
        placed = _placed(keys, room.size, name, max(room.counts))
        del keys
        table.layout = placed.layout
        sizes = np.array(agreed(lambda: placed.num_keys, communicator, name))
        ends = [placed.layout.range_of(rank, len(ranks))[1] for rank in ranks]
        spare = (room.size - total) * np.array([0, *ends]) // placed.layout.num_buckets
        capacities = sizes + np.diff(spare)
    if not capacities.any():  # a gather needs a row
        capacities = (np.arange(len(ranks)) == 0).astype(np.int64)
    rank = communicator.rank
    begin, capacity = int(capacities[:rank].sum()), int(capacities[rank])
    return _Share(begin, int(sizes[rank]), capacity, placed)


def _write(variable, table, share, stock, parts):
    """Writes this rank's share: rows with keys, the index, and rows of zeros."""
    name, placed, begin = _call(variable), share.placed, share.begin
    row_parts = [f"rows_{table.dim}", *([f"scales_{table.dim}"] if stock.scales else [])]

    def slice_of(part, at, value):
        return Slice(key_of(attribute_of(part)), stock.large()[part].shape, [at], value)

    def rows_at(at, rows):
        coded = encoded(rows, stock.rows[table.dim].dtype, table.table_name)
        for part, value in zip(row_parts, coded, strict=True):
            yield slice_of(part, table.first_row + at, value)

    def zeros(at, end):
        return rows_at(begin + share.size + at, np.zeros([end - at, table.dim], np.float32))

    def index(at, end):
        bucket = table.first_bucket + placed.begin + at
        yield slice_of("keys", bucket, placed.keys[at:end])
        if share.placement is None:
            numbers = (table.first_row + begin + starts[at:end]).astype(stock.number_dtype)
            yield slice_of("starts", bucket, numbers)
        else:
            yield slice_of("numbers", bucket * SLOTS, share.placement.numbers(at, end))

    def keys_at(at, end):
        if placed is None:
            return np.arange(begin + at, begin + min(end, share.size))
        return placed.keys[at:end][np.arange(SLOTS) < placed.counts[at:end, np.newaxis]]

    step = contents.CHUNK_BYTES // (8 + 4 * table.dim)
    if variable.home is not None:  # which all ask at once
        step //= comm.current().world_size
    step = max(1, step if placed is None else step // SLOTS)
    starts: Any = range(share.size) if placed is None else placed.starts()
    for at in range(0, max(agreed(lambda: len(starts), comm.current(), name)), step):
        rows = _rows(variable, keys_at(at, at + step), name)
        parts.write(lambda: rows_at(begin + int(starts[at]), rows) if len(rows) else ())  # noqa: B023
    spare = Rows(share.capacity - share.size, 4 * table.dim, zeros)
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
    owners = table_keys.owners(keys, communicator.world_size)
    if variable.home is not None:
        owners[:] = variable.home % communicator.world_size
    asked, answer = contents.to_ranks(keys, owners, name)

    def find():
        rows, present = variable.find(asked)
        if not variable.key_limit and not present.numpy().all():
            raise _has_changed(variable, "keys that are gone,")
        return rows.numpy()

    return answer(all_or_none(find, communicator, name))
