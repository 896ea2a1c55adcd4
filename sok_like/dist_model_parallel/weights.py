"""Whole tables from their shards and back, some rows at a time.

    get    each rank gathers the chunk's rows of its shards =floats=> rank 0 (or all) puts them
           together in an array [input_dim, output_dim]
    set    each rank copies its shards' part of the chunk out of the whole: nothing is sent

Files are mapped into memory, so that a rank reads what it holds and no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like import comm
from sok_like.planner.tables import DATA_PARALLEL, Plan, as_integer

# Bytes of one table that a rank sends at a time.
CHUNK_BYTES = 64 * 2**20

# By table: the variable that holds this rank's shard, and the first row of the shard in it.
Shards = Mapping[int, tuple[Any, int]]


def get_tables(plan: Plan, here: Shards, all_ranks: bool) -> list[np.ndarray]:
    """All tables, whole, on rank 0 or on all ranks; an empty list elsewhere."""
    communicator = comm.current()
    receive = all_ranks or communicator.rank == 0
    tables = []
    for table in plan.tables:
        whole = _get_table(plan, table.table_id, here, communicator, all_ranks, receive)
        if receive:
            tables.append(whole)
    return tables


def _get_table(plan, table_id, here, communicator, all_ranks, receive):
    table = plan.tables[table_id]
    variable, first_row = here.get(table_id, (None, 0))
    if plan.kinds[table_id] == DATA_PARALLEL or communicator.world_size == 1:
        return _read(variable, first_row, first_row + table.input_dim) if receive else None
    shards = plan.shards_of(table_id)
    mine = plan.shard(table_id, communicator.rank)
    dtype = tf.as_dtype(_agree_on_dtype(variable, communicator))
    whole = np.empty([table.input_dim, table.output_dim], dtype.as_numpy_dtype) if receive else None
    rows = max(1, CHUNK_BYTES // (table.output_dim * dtype.size))
    for start in range(0, table.input_dim, rows):
        stop = min(start + rows, table.input_dim)
        block = np.zeros([0], dtype.as_numpy_dtype)
        if mine is not None:
            low, high = _overlap(mine, start, stop)
            if low < high:
                offset = first_row - mine.row_start
                block = _read(variable, low + offset, high + offset).reshape(-1)
        received = _send(block, communicator, all_ranks)
        if receive:
            at = 0
            for shard in shards:
                low, high = _overlap(shard, start, stop)
                size = max(0, high - low) * shard.num_columns
                if size:
                    part = received[at : at + size].reshape(high - low, shard.num_columns)
                    whole[low:high, shard.column_start : shard.column_stop] = part
                at += size
    return whole


def _send(block, communicator, all_ranks):
    """Blocks of all ranks in rank order, on rank 0 or on all."""
    if all_ranks:
        return communicator.all_gather(tf.constant(block), "dmp_get_weights").numpy()
    splits = [0] * communicator.world_size
    splits[0] = block.size
    received, _ = communicator.all_to_all(
        tf.constant(block), tf.constant(splits, tf.int32), "dmp_get_weights"
    )
    return received.numpy()


def _agree_on_dtype(variable, communicator):
    # A rank without a shard does not know its table's dtype, and must send none of it.
    mine = 0 if variable is None else variable.dtype.base_dtype.as_datatype_enum
    known = communicator.all_gather(tf.constant([mine], tf.int32), "dmp_table_dtype")
    return int(tf.reduce_max(known))


def _overlap(shard, start, stop):
    return max(shard.row_start, start), min(shard.row_stop, stop)


def _read(variable, start, stop):
    """Rows `[start, stop)` as an array, without a copy of the others."""
    return tf.gather(variable, tf.range(start, stop, dtype=tf.int64)).numpy()


def set_tables(
    plan: Plan, here: Shards, weights: Sequence[Any], chunk: int, use_lock: bool
) -> None:
    """Sets this rank's shards from whole tables; see `DistributedEmbedding.set_weights`."""
    communicator = comm.current()
    sources: list[np.ndarray] = []

    def check():
        if as_integer(chunk) is None or chunk < 1:
            raise ValueError(f"`chunk` must be a positive integer. Received: chunk={chunk!r}")
        sources.extend(_open(plan, weights))

    _all_or_none(check, communicator)
    for rank in range(communicator.world_size) if use_lock else [communicator.rank]:
        if rank == communicator.rank:
            copy = lambda: _copy(plan, here, sources, chunk)  # noqa: E731
        else:
            copy = None
        if use_lock:
            # A rank that fails says so in its turn, so the others do not wait for it.
            _all_or_none(copy, communicator)
        elif copy is not None:
            copy()


def _copy(plan, here, sources, chunk):
    for table_id, (variable, first_row) in here.items():
        shard = plan.shard(table_id, comm.current().rank)
        rows = max(1, chunk // shard.num_columns)
        for start in range(shard.row_start, shard.row_stop, rows):
            stop = min(start + rows, shard.row_stop)
            values = sources[table_id][start:stop, shard.column_start : shard.column_stop]
            offset = first_row - shard.row_start
            indices = tf.range(start + offset, stop + offset, dtype=tf.int64)
            updates = tf.cast(np.ascontiguousarray(values), variable.dtype)
            tf.raw_ops.ResourceScatterUpdate(
                resource=variable.handle, indices=indices, updates=updates
            )


def _open(plan, weights):
    """The weights as arrays, in memory or mapped; ValueError unless they fit the tables."""
    rule = f"`weights` must hold {len(plan.tables)} tables, one an embedding. Received: "
    if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
        raise ValueError(f"{rule}{weights!r}")
    weights = list(weights)
    if len(weights) != len(plan.tables):
        raise ValueError(f"{rule}{len(weights)}")
    arrays = []
    for table, weight in zip(plan.tables, weights, strict=True):
        if isinstance(weight, (str, os.PathLike)):
            weight = _map_file(table.table_id, weight)
        elif not isinstance(weight, np.ndarray):
            weight = np.asarray(weight)
        if weight.shape != (table.input_dim, table.output_dim):
            raise ValueError(
                f"`weights[{table.table_id}]` must have the shape "
                f"({table.input_dim}, {table.output_dim}). Received: shape {weight.shape}"
            )
        if weight.dtype.kind not in "fiub" and weight.dtype != tf.bfloat16.as_numpy_dtype:
            raise ValueError(
                f"`weights[{table.table_id}]` must hold real numbers. Received: {weight.dtype}"
            )
        arrays.append(weight)
    return arrays


def _map_file(table_id, path):
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"`weights[{table_id}]` must be an array or the path of an .npy file. "
            f"Received: {os.fspath(path)!r} ({error})"
        ) from error


def _all_or_none(function, communicator):
    """Calls `function` unless it is None; an exception on one rank is a ValueError on all."""
    error = None
    try:
        if function is not None:
            function()
    except Exception as raised:
        error = raised
    if communicator.world_size == 1:
        if error is not None:
            raise error
        return
    text = f"rank {communicator.rank}: {error}".encode() if error is not None else b""
    bytes_ = tf.constant(np.frombuffer(text, np.uint8))
    told = bytes(communicator.all_gather(bytes_, "dmp_set_weights").numpy()).decode()
    if told:
        raise ValueError(told) from error
