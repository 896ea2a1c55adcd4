"""Gathers the tables of a model from the ranks into variables of rank 0.

    keys    every rank =keys=> rank 0 puts them into buckets
    rows    every rank =some rows at a time=> rank 0 writes them to their positions

Rank 0 needs memory for the index and all rows in their exported dtype, 64 MiB of rows in transit,
and about 60 bytes per key of the table being placed. Every rank needs a copy of its own rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.placement import Placement
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable
from sok_like.runtime import comm
from sok_like.runtime.agreement import all_or_none, send
from sok_like.saving import streams
from sok_like.table.variable import EmbeddingVariable, unwrap

# Bytes of rows that all ranks together send at once.
CHUNK_BYTES = 64 * 2**20
_LEAST_ROOM = 1024  # keys, beside the headroom


def variables_of(model: Any) -> list[Any]:
    """The model's variables, including other variables that it tracks; each once."""
    found: dict[int, Any] = {}
    listed = getattr(model, "variables", ())
    for variable in [*listed, *_tracked(model)]:
        variable = unwrap(variable)
        if isinstance(variable, tf.Variable) or hasattr(variable, "_sok_shard"):
            found.setdefault(id(variable), variable)
    return list(found.values())


def holders_of(model: Any) -> Iterator[Any]:
    """Layers that spread their tables over ranks themselves: they have `whole_for_export`."""
    seen = set()
    layers = getattr(model, "_flatten_layers", lambda: ())()
    for item in [*layers, *_tracked(model)]:
        if hasattr(item, "whole_for_export") and id(item) not in seen:
            seen.add(id(item))
            yield item


def is_spread(variable: Any) -> bool:
    """Whether ranks hold parts of a variable."""
    return isinstance(variable, EmbeddingVariable) or hasattr(variable, "_sok_shard")


def _tracked(model):
    return tf.train.TrackableView(model).descendants()


class Changes(NamedTuple):
    """What changed in this rank's shard of a table since an instant.

    Attributes:
        keys: int64 `[num_keys]`.
        rows: float32 `[num_keys, dim]`.
        erased: int64 `[num_erased]`.
        whole: Whether these keys are all that there are.
        now: The number of this instant; 0: the table does not record changes.
    """

    keys: np.ndarray
    rows: np.ndarray
    erased: np.ndarray
    whole: bool
    now: int


def changes(variable: EmbeddingVariable, since: int) -> Changes:
    """Reads them, and makes the table record what changes from now on.

    Args:
        since: `Changes.now` of that instant; 0: reads the whole shard.

    Raises:
        ValueError: the table is in device memory.
    """
    try:
        found, has_moved = _read(variable, since)
    except ValueError:  # the log of changes had become larger than the table
        if not since:
            raise
        has_moved = True
    # An optimizer may have moved rows outside of the batch.
    return _read(variable, 0)[0] if has_moved and since else found


def _read(variable, since):
    number = int(variable.hand_over())
    with streams.content(number, variable.dim, since) as (shard, now):
        keys = np.empty(shard.keys.shape, np.int64)
        rows = np.empty(shard.rows.shape, np.float32)
        at = 0
        for part in shard.parts(max(1, CHUNK_BYTES // (8 + 4 * variable.dim))):
            end = at + len(part["keys"])
            keys[at:end], rows[at:end] = part["keys"], part["rows"]
            at = end
        return Changes(keys, rows, shard.erased, shard.whole, now), bool(shard.steps[:, 0].any())


def stock_table(
    variable: EmbeddingVariable, row_dtype: str, initial: bool, headroom: float | None = None
) -> tuple[StockTable | None, Placement | None, int]:
    """The whole table on rank 0; None on the other ranks, which must call this, too.

    Args:
        headroom: None, or the room for new keys in a table that can be refreshed, as a fraction of
            the keys.

    Returns:
        The table; with `headroom` also where it has its keys, and on all ranks the number of this
        instant, for `changes`.
    """
    communicator = comm.current()
    found: list[Any] = []

    def read():
        if headroom is not None:
            found.extend(changes(variable, 0))
            return
        snapshot = variable.snapshot(with_slots=False)
        found.extend([snapshot.keys.numpy(), snapshot.rows.numpy(), None, True, 0])

    all_or_none(read, communicator)
    made: list[Any] = []

    def start(keys):
        missing = MissingRows(variable, initial, headroom is not None)
        if variable.key_limit:
            table = StockTable(variable, None, variable.key_limit, row_dtype, missing)
            made.extend([table, None])
            return keys
        room = len(keys) if headroom is None else _LEAST_ROOM + int(len(keys) * (1 + headroom))
        place = buckets.place(keys, room)
        placement = None if headroom is None else Placement(place, room)
        made.extend([StockTable(variable, place, room, row_dtype, missing, placement), placement])
        return place.rows

    gather(variable, found[0], found[1], start, lambda *rows: made[0].fill(*rows))
    table, placement = made or (None, None)
    return table, placement, found[4]


def gather(
    variable: EmbeddingVariable,
    keys: np.ndarray,
    rows: np.ndarray,
    start: Callable[[np.ndarray], np.ndarray],
    take: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Sends keys and rows of all ranks to rank 0; every rank must call it.

    Args:
        keys: int64 `[num_keys]`.
        rows: float32 `[num_keys, dim]`.
        start: Called on rank 0 with all keys; returns their positions.
        take: Called on rank 0 with some positions and their rows, until all have been there.

    Raises:
        ValueError: what either raises on rank 0; on all ranks.
    """
    communicator = comm.current()
    name = f"export of table '{variable.table_name}'"
    numbers = send(np.array([len(keys)]), communicator, True, name)
    step = max(1, CHUNK_BYTES // (len(numbers) * max(8, 4 * variable.dim)))
    of_all = [
        _sent(keys[at : at + step], communicator, name) for at in range(0, max(numbers), step)
    ]
    positions: list[np.ndarray] = []  # by chunk: the positions of its rows

    def begin():
        if communicator.rank != 0:
            return
        where = start(np.concatenate(of_all) if of_all else np.zeros([0], np.int64))
        ends = np.cumsum([len(chunk) for chunk in of_all])[:-1]
        positions.extend(np.split(where, ends) if of_all else [])
        of_all.clear()

    all_or_none(begin, communicator)

    problems: list[ValueError] = []
    for number, at in enumerate(range(0, max(numbers), step)):
        # Continues after a problem, because the other ranks send all chunks.
        chunk = _sent(rows[at : at + step].reshape(-1), communicator, name)
        if positions and not problems:
            try:
                take(positions[number], chunk.reshape(-1, variable.dim))
            except ValueError as error:
                problems.append(error)

    def check():
        if problems:
            raise problems[0]

    all_or_none(check, communicator)


def whole_array(block: np.ndarray, name: str) -> np.ndarray:
    """The ranks' int64 blocks on rank 0, in rank order; every rank must call it."""
    return _sent(block, comm.current(), name)


def _sent(block, communicator, name):
    """The ranks' blocks on rank 0, in rank order."""
    return block if communicator.world_size == 1 else send(block, communicator, False, name)


@contextlib.contextmanager
def spread_whole(model: Any, variables: Iterable[Any]) -> Iterator[tuple[dict[int, Any], list]]:
    """A scope in which everything that is spread over ranks, beside tables, is whole on rank 0.

    Every rank must enter it.

    Yields:
        What replaces the tables of layers, by the layer's `id`; and all whole variables, always in
        the same order.
    """
    whole = {id(holder): holder.whole_for_export() for holder in holders_of(model)}
    with _held_whole(variables) as held:
        yield whole, [*tf.nest.flatten(list(whole.values())), *held]


@contextlib.contextmanager
def _held_whole(variables: Iterable[Any]) -> Iterator[list[tf.Variable]]:
    """A scope in which variables that are sharded over ranks are read whole, on all ranks."""
    sharded = [v for v in variables if getattr(v, "_sok_shard", None) is not None]
    for variable in sharded:
        with tf.device("/CPU:0"):
            variable._sok_held = tf.Variable(tf.convert_to_tensor(variable), trainable=False)
    try:
        yield [variable._sok_held for variable in sharded]
    finally:
        for variable in sharded:
            variable._sok_held = None
