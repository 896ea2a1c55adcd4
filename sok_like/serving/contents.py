"""Gathers the tables of a model from the ranks into variables of rank 0.

    keys    every rank =keys=> rank 0 puts them into buckets
    rows    every rank =some rows at a time=> rank 0 writes them to their positions

Rank 0 needs memory for the index and all rows in their exported dtype, 64 MiB of rows in transit,
and about 60 bytes per key of the table being placed. Every rank needs a copy of its own rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable
from sok_like.runtime import comm
from sok_like.runtime.agreement import all_or_none, send
from sok_like.table.variable import EmbeddingVariable, unwrap

# Bytes of rows that all ranks together send at once.
CHUNK_BYTES = 64 * 2**20


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


def stock_table(variable: EmbeddingVariable, row_dtype: str, initial: bool) -> StockTable | None:
    """The whole table on rank 0; None on the other ranks, which must call this, too."""
    communicator = comm.current()
    snapshot = variable.snapshot(with_slots=False)
    keys, rows = snapshot.keys.numpy(), snapshot.rows.numpy()
    name = f"export of table '{variable.table_name}'"
    numbers = send(np.array([len(keys)]), communicator, True, name)
    step = max(1, CHUNK_BYTES // (len(numbers) * max(8, 4 * variable.dim)))
    of_all = [
        _sent(keys[at : at + step], communicator, name) for at in range(0, max(numbers), step)
    ]
    made: list[StockTable] = []
    positions: list[np.ndarray] = []  # by chunk: the positions of its rows

    def make():
        if communicator.rank != 0:
            return
        joined = np.concatenate(of_all) if of_all else np.zeros([0], np.int64)
        if variable.key_limit:
            where, place, count = joined, None, variable.key_limit
        else:
            place = buckets.place(joined)
            where, count = place.rows, len(joined)
        ends = np.cumsum([len(chunk) for chunk in of_all])[:-1]
        positions.extend(np.split(where, ends) if of_all else [])
        missing = MissingRows(variable, initial)
        made.append(StockTable(variable, place, count, row_dtype, missing))
        of_all.clear()

    all_or_none(make, communicator)

    problems: list[ValueError] = []
    for number, at in enumerate(range(0, max(numbers), step)):
        # Continues after a problem, because the other ranks send all chunks.
        chunk = _sent(rows[at : at + step].reshape(-1), communicator, name)
        if made and not problems:
            try:
                made[0].fill(positions[number], chunk.reshape(-1, variable.dim))
            except ValueError as error:
                problems.append(error)

    def check():
        if problems:
            raise problems[0]

    all_or_none(check, communicator)
    return made[0] if made else None


def _sent(block, communicator, name):
    """The ranks' blocks on rank 0, in rank order."""
    return block if communicator.world_size == 1 else send(block, communicator, False, name)


@contextlib.contextmanager
def held_whole(variables: Iterable[Any]) -> Iterator[None]:
    """A scope in which variables that are sharded over ranks are read whole.

    Every rank must enter it; the whole value is gathered on all of them.
    """
    sharded = [v for v in variables if getattr(v, "_sok_shard", None) is not None]
    for variable in sharded:
        with tf.device("/CPU:0"):
            variable._sok_held = tf.Variable(tf.convert_to_tensor(variable), trainable=False)
    try:
        yield
    finally:
        for variable in sharded:
            variable._sok_held = None
