"""Reads and writes a hash table as a pair of arrays, keys and rows.

    get    each rank's keys and rows, in chunks =keys, floats=> rank 0 (or all) sorts them
    set    each rank takes the keys it owns out of the whole: nothing is sent

The result is sorted by key, so it does not depend on the number of ranks.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import all_or_none, send
from sok_like.saving.format import durable
from sok_like.table.keys import in_key_dtype, owned
from sok_like.table.variable import EmbeddingVariable

# Bytes of a table that a rank sends at once.
CHUNK_BYTES = 64 * 2**20


def gather_by_key(variable, keys, rows, all_ranks):
    """Gathers keys and rows of all ranks, sorted by key, on rank 0 or all ranks; None elsewhere."""
    communicator = comm.current()

    def check():
        in_key_dtype(tf.constant(keys), variable)

    if variable.key_dtype.size < 8:  # raises on all ranks if a key does not fit
        all_or_none(check, communicator)
    if communicator.world_size > 1:
        longest = int(send(np.array([len(keys)], np.int64), communicator, True).max())
        step = max(1, CHUNK_BYTES // (8 + rows.itemsize * rows.shape[1]))
        parts = []
        for start in range(0, longest, step):
            of_keys = send(keys[start : start + step], communicator, all_ranks)
            of_rows = send(rows[start : start + step].reshape(-1), communicator, all_ranks)
            parts.append((of_keys, of_rows.reshape(-1, rows.shape[1])))
        if not all_ranks and communicator.rank != 0:
            return None
        keys = np.concatenate([keys[:0], *(part for part, _ in parts)])
        rows = np.concatenate([rows[:0], *(part for _, part in parts)])
    keys = in_key_dtype(tf.constant(keys), variable).numpy()
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def open_pair(what: str, pair: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Checks and opens keys, int64 `[num_keys]`, and rows, which may stay on disk."""
    rule = f"`{what}` of a hash table must be a pair (keys [n], rows [n, {width}])"
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{rule}. Received: {type(pair).__name__}")
    keys, rows = (as_array(what, item) for item in pair)
    if keys.ndim != 1 or not (np.issubdtype(keys.dtype, np.integer) or keys.size == 0):
        raise ValueError(f"{rule}. Received: keys of shape {keys.shape} and dtype {keys.dtype}")
    if rows.shape != (len(keys), width):
        raise ValueError(f"{rule}. Received: {len(keys)} keys and rows of shape {rows.shape}")
    check_real(what, rows)
    keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
    if len(np.unique(keys)) != len(keys):
        raise ValueError(f"{rule}, each key once. Received: duplicate keys")
    return keys, rows


def as_array(what: str, value: Any) -> np.ndarray:
    """An array, or an `.npy` file, mapped into memory if it is local; ValueError if unreadable."""
    if not isinstance(value, (str, os.PathLike)):
        return value if isinstance(value, np.ndarray) else np.asarray(value)
    try:
        place = durable.local(value)
        if place is not None:
            return np.load(place, mmap_mode="r", allow_pickle=False)
        with durable.open_to_read(value) as file:
            return np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"`{what}` must be an array or the path of an .npy file. "
            f"Received: {os.fspath(value)!r} ({error})"
        ) from error


def check_real(what: str, array: np.ndarray) -> None:
    """Raises ValueError unless `array` holds real numbers."""
    if array.dtype.kind not in "fiub" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise ValueError(f"`{what}` must hold real numbers. Received: {array.dtype}")


def check_capacity(what: str, variable: EmbeddingVariable, keys: np.ndarray) -> None:
    """Raises ValueError if this rank cannot hold its keys."""
    capacity, num_keys = variable.get_config()["capacity"], len(owned(keys))
    if capacity is not None and num_keys > capacity:
        raise ValueError(
            f"`{what}` must hold at most capacity={capacity} keys per rank (table "
            f"'{variable.table_name}'). Received: {num_keys}"
        )
