"""Writes the tables of a model into the parts of a SavedModel: no rank holds a whole table.

    sizes   every rank counts its keys, so all know how large the variables are
    keys    every rank =keys=> the rank that places them (`Layout.ranks_of`) puts them into buckets
    rows    that rank =some keys=> the ranks that own them =rows=> it writes index and rows

Keys and rows are those of one table after the other. A rank needs memory for its share of the index
of one table, and about 30 bytes for each key in it while it places them. Rows take a few times
`parts.CHUNK_BYTES` in transit.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.buckets import SLOTS, Buckets, Placement
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable, StockTables, encoded
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none
from sok_like.runtime.ranks.exchange_order import collective_in_turn
from sok_like.serving import parts
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
    into: Parts,
    row_dtype: str,
    missing: str,
    headroom: Any,
) -> tuple[StockTables, list["ServedTable"]]:
    """Writes the tables of a model; every rank must call it. `headroom` None: for no refreshes."""
    follows = headroom is not None
    tables = [ServedTable(variable, headroom) for variable in variables]

    def prepare():
        for table in tables:
            variable, room = table.variable, table.room
            missing_rows = MissingRows(variable, missing == "initial")
            layout = None if variable.key_limit else buckets.layout_for(room)
            table.stock = StockTable(variable, max(1, room), missing_rows, layout)
        return StockTables([table.stock for table in tables], row_dtype, follows)

    stock = all_or_none(prepare, comm.current())
    for table in tables:
        table.take_share(table.take_keys(follows))
        if follows and table.placed is not None:
            first_row, kind = table.stock.first_row + table.begin, stock.number_dtype
            table.placement = Placement(table.placed, first_row, table.capacity, kind)
        table.write(stock, into)
        table.placed = None
    return stock, tables


class ServedTable:
    """A table and its place in a SavedModel; all ranks take the steps of all tables together."""

    stock: StockTable
    placed: Buckets | None = None  # this rank's keys, while they are written
    placement: Placement | None = None  # of them, if the table has an index and can be refreshed
    instant: int  # since which the served table lacks what changes, see `delta.changes_since`
    # The rows that this rank writes: some with keys, and then rows of zeros.
    begin: int
    size: int  # with keys
    capacity: int

    def __init__(self, variable, headroom):
        self.variable, self._communicator = variable, comm.current()
        self._call = f"export of table '{variable.table_name}'"

        def count():
            if headroom is not None and variable.keeps_records:
                variable.evict()  # the instant at which deltas begin would do it
            return int(variable.size())

        self._counts = agreed(count, self._communicator, self._call, ValueError)  # by rank
        self.room = total = sum(self._counts)  # rows of all ranks
        if variable.key_limit:
            self.room = variable.key_limit
        elif headroom is not None:
            self.room = _LEAST_ROOM + int(total * (1 + headroom))

    def take_keys(self, follows):
        """This rank's keys; sets their instant."""
        variable = self.variable

        def read():
            number = int(variable.register_for_read(with_slots=False))
            since = 0 if follows else None
            with contextlib.closing(table_reader.TableReader(number, since)) as stream:
                keys = np.zeros([0], np.int64) if variable.key_limit else stream.keys()
                self.instant = stream.instant
            if not variable.key_limit and len(keys) != self._counts[self._communicator.rank]:
                raise self._has_changed("another number of keys")
            return keys

        return all_or_none(read, self._communicator, self._call)

    def _has_changed(self, what):
        return ValueError(
            f"A table must not change while it is exported. Received: {what} of table "
            f"'{self.variable.table_name}'"
        )

    def take_share(self, keys):
        """Finds this rank's share of the rows; sets the salt of the table's layout."""
        rank, ranks = self._communicator.rank, range(self._communicator.world_size)
        if self.variable.key_limit:
            ends = [self.room * (rank + 1) // len(ranks) for rank in ranks]
            sizes = capacities = np.diff([0, *ends])
        else:
            placed = self.placed = self._place(keys)
            del keys
            self.stock.layout = placed.layout
            sizes = np.array(agreed(lambda: placed.num_keys, self._communicator, self._call))
            ends = [placed.layout.range_of(rank, len(ranks))[1] for rank in ranks]
            free = self.room - sum(self._counts)
            spare = free * np.array([0, *ends]) // placed.layout.num_buckets
            capacities = sizes + np.diff(spare)
        if not capacities.any():  # a gather needs a row
            capacities = (np.arange(len(ranks)) == 0).astype(np.int64)
        self.begin, self.size = int(capacities[:rank].sum()), int(sizes[rank])
        self.capacity = int(capacities[rank])

    def _place(self, keys):
        """This rank's buckets, of the keys of all ranks."""
        rank, world_size = self._communicator.rank, self._communicator.world_size
        step = parts.CHUNK_BYTES // 8
        for attempt in range(buckets.TRIES):
            layout, own_keys = buckets.layout_for(self.room, attempt), keys
            if world_size > 1:
                starts = range(0, max(1, *self._counts), step)
                chunks = (keys[at : at + step] for at in starts)
                owned = (
                    to_ranks(chunk, layout.ranks_of(chunk, world_size), self._call)[0]
                    for chunk in chunks
                )
                own_keys = np.concatenate(list(owned))
            placed: list[Any] = []

            def place():
                bounds = layout.range_of(rank, world_size)  # noqa: B023
                placed.append(buckets.place(own_keys, layout, *bounds))  # noqa: B023
                return placed[0] is not None  # noqa: B023

            if all(agreed(place, self._communicator, self._call, ValueError)):
                return placed[0]
        raise RuntimeError(
            f"{self.room} keys found no place in {layout.num_buckets} buckets of {SLOTS}, with any "
            f"of {buckets.TRIES} salts."
        )

    def write(self, stock, into):
        """Writes this rank's share: rows with keys, the index, and rows of zeros."""
        table, placed, begin = self.stock, self.placed, self.begin
        row_parts = [f"rows_{table.dim}", *([f"scales_{table.dim}"] if stock.scales else [])]

        def slice_of(part, at, value):
            return Slice(key_of(attribute_of(part)), stock.large[part].shape, [at], value)

        def rows_at(at, rows):
            coded = encoded(rows, stock.rows[table.dim].dtype, table.table_name)
            for part, value in zip(row_parts, coded, strict=True):
                yield slice_of(part, table.first_row + at, value)

        def zeros(at, end):
            return rows_at(begin + self.size + at, np.zeros([end - at, table.dim], np.float32))

        def index(at, end):
            bucket = table.first_bucket + placed.begin + at
            yield slice_of("keys", bucket, placed.keys[at:end])
            if self.placement is None:
                numbers = (table.first_row + begin + starts[at:end]).astype(stock.number_dtype)
                yield slice_of("starts", bucket, numbers)
            else:
                yield slice_of("numbers", bucket * SLOTS, self.placement.numbers(at, end))

        def keys_at(at, end):
            if placed is None:
                return np.arange(begin + at, begin + min(end, self.size))
            return placed.keys[at:end][np.arange(SLOTS) < placed.counts[at:end, np.newaxis]]

        step = parts.CHUNK_BYTES // (8 + 4 * table.dim)
        if self.variable.home is not None:  # which all ask at once
            step //= self._communicator.world_size
        step = max(1, step if placed is None else step // SLOTS)
        starts: Any = range(self.size) if placed is None else placed.starts()
        for at in range(0, max(agreed(lambda: len(starts), self._communicator, self._call)), step):
            rows = self._rows(keys_at(at, at + step))
            into.write(lambda: rows_at(begin + int(starts[at]), rows) if len(rows) else ())  # noqa: B023
        spare = Rows(self.capacity - self.size, 4 * table.dim, zeros)
        of_index = [] if placed is None else [Rows(len(starts), 12 * SLOTS, index)]
        into.write_rows([*of_index, spare])

    def _rows(self, keys):
        """The rows of keys that any rank owns, float32 `[num_keys, dim]`."""
        variable, world_size = self.variable, self._communicator.world_size
        owners = table_keys.owners(keys, world_size)
        if variable.home is not None:
            owners[:] = variable.home % world_size
        asked, answer = to_ranks(keys, owners, self._call)

        def find():
            rows, present = variable.find(asked)
            if not variable.key_limit and not present.numpy().all():
                raise self._has_changed("keys that are gone,")
            return rows.numpy()

        return answer(all_or_none(find, self._communicator, self._call))


def to_ranks(
    block: np.ndarray, ranks: np.ndarray, name: str
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Sends each item of `block` `[n, ...]` to its rank; returns those that came, by rank."""
    # Also returns a function that sends an answer to each of them back, and returns the answers to
    # `block`. Every rank must call it, or none.
    communicator = comm.current()
    if communicator.world_size == 1:
        return block, lambda answers: answers

    def exchanged(items, splits):
        items, splits = tf.constant(items), tf.constant(splits, tf.int32)
        received = collective_in_turn(communicator, "all_to_all", items, name, splits)
        return [tensor.numpy() for tensor in received]

    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=communicator.world_size)
    received, lengths = exchanged(block[order], counts)

    def send_back(answers):
        in_rank_order, _ = exchanged(answers, lengths)
        answered = np.empty_like(in_rank_order)
        answered[order] = in_rank_order
        return answered

    return received, send_back
