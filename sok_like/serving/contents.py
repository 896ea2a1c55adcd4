"""What a model holds, and how the ranks exchange it: its variables, and what changed in a table."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.exchange_order import exchange_in_turn
from sok_like.table import table_reader
from sok_like.table.content import TableShard
from sok_like.table.variable import EmbeddingVariable, unwrap

CHUNK_BYTES = 64 * 2**20  # of rows that are sent or written at once


def variables_of(model: Any) -> list[Any]:
    """The model's variables, including other variables that it tracks; each once."""
    tracked = tf.train.TrackableView(model).descendants()
    items = map(unwrap, [*getattr(model, "variables", ()), *tracked])
    by_id = {id(v): v for v in items if isinstance(v, tf.Variable) or is_spread(v)}
    return list(by_id.values())


def holders_of(model: Any) -> list[Any]:
    """Layers that spread their tables over ranks themselves."""
    layers = getattr(model, "_flatten_layers", lambda: ())()
    items = [*layers, *tf.train.TrackableView(model).descendants()]
    by_id = {id(i): i for i in items if hasattr(i, "spread_for_export") and not is_spread(i)}
    return list(by_id.values())


def is_spread(variable: Any) -> bool:
    """Whether ranks hold parts of a variable."""
    return isinstance(variable, EmbeddingVariable) or hasattr(variable, "_sok_shard")


def changes(variable: EmbeddingVariable, since: int) -> tuple[TableShard, int]:
    """What changed in this rank's shard of a table since an instant, by its number; and now's."""
    try:
        read, now = _read(variable, since)
        # An optimizer may have moved rows outside of the batch.
        has_moved = bool(read.steps[:, 0].any())
    except ValueError:  # the log of changes had become larger than the table
        has_moved = True
    return _read(variable, 0) if has_moved else (read, now)


def _read(variable, since):
    number = int(variable.register_for_read())
    with table_reader.content(number, variable.dim, since) as (shard, now):
        keys = np.empty(shard.keys.shape, np.int64)
        rows = np.empty(shard.rows.shape, np.float32)
        end = 0
        for part in shard.parts(max(1, CHUNK_BYTES // (8 + 4 * variable.dim))):
            at, end = end, end + len(part["keys"])
            keys[at:end], rows[at:end] = part["keys"], part["rows"]
        return dataclasses.replace(shard, keys=keys, rows=rows, read=None), now


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
        collective = functools.partial(communicator.all_to_all, items, splits, name)
        return [tensor.numpy() for tensor in exchange_in_turn(collective, name, communicator)]

    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=communicator.world_size)
    received, lengths = exchanged(block[order], counts)

    def send_back(answers):
        in_rank_order, _ = exchanged(answers, lengths)
        answered = np.empty_like(in_rank_order)
        answered[order] = in_rank_order
        return answered

    return received, send_back
