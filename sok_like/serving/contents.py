"""What a model holds, and how the ranks exchange it: its variables, and what changed in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.turns import exchange_in_turn
from sok_like.saving import streams
from sok_like.table.variable import EmbeddingVariable, unwrap

CHUNK_BYTES = 64 * 2**20  # of rows that are sent or written at once


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
    """Layers that spread their tables over ranks themselves."""
    seen = set()
    layers = getattr(model, "_flatten_layers", lambda: ())()
    for item in [*layers, *_tracked(model)]:
        if hasattr(item, "spread_for_export") and id(item) not in seen and not is_spread(item):
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
        now: The number of this instant.
    """

    keys: np.ndarray
    rows: np.ndarray
    erased: np.ndarray
    whole: bool
    now: int


def changes(variable: EmbeddingVariable, since: int) -> Changes:
    """Reads them.

    Args:
        since: The number of that instant.

    Raises:
        ValueError: the table is in device memory.
    """
    try:
        found, has_moved = _read(variable, since)
    except ValueError:  # the log of changes had become larger than the table
        has_moved = True
    # An optimizer may have moved rows outside of the batch.
    return _read(variable, 0)[0] if has_moved else found


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


def to_ranks(
    block: np.ndarray, ranks: np.ndarray, name: str
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Sends each item of `block` `[n, ...]` to its rank, of int64 `ranks` `[n]`.

    Every rank must call this, and afterwards the function that it returns, or none.

    Returns:
        The items that came here, in rank order; and a function that sends back an answer to each of
        them, and returns the answers to `block`, `[n, ...]`.
    """
    communicator = comm.current()
    if communicator.world_size == 1:
        return block, lambda answers: answers

    def exchanged(items, splits):
        splits = tf.constant(splits, tf.int32)
        items = tf.constant(items)
        found = exchange_in_turn(
            lambda: communicator.all_to_all(items, splits, name), name, communicator
        )
        return [each.numpy() for each in found]

    order = np.argsort(ranks, kind="stable")
    received, lengths = exchanged(
        block[order], np.bincount(ranks, minlength=communicator.world_size)
    )

    def send_back(answers):
        found, _ = exchanged(answers, lengths)
        answered = np.empty_like(found)
        answered[order] = found
        return answered

    return received, send_back
