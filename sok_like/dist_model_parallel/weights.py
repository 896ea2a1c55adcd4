"""Reads whole tables from their shards, and writes them to shards, some rows at a time.

    get    each rank reads the chunk's rows of its shards =floats=> rank 0 (or all) puts them
           into an array [input_dim, output_dim]
    set    each rank copies its part of the chunk out of the whole: nothing is sent

Files are memory-mapped, so a rank reads only its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.dist_model_parallel import hash_weights
from sok_like.dist_model_parallel.hash_weights import CHUNK_BYTES
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.planner.tables import DATA_PARALLEL, HASHED, Plan, Shard, TableConfig
from sok_like.runtime.checks import check_integer
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.agreement import all_or_none, one_rank_at_a_time, send
from sok_like.table.slices import HeldSlice, TableSlice
from sok_like.table.weights import replace_rows


class Held(NamedTuple):
    """A plan, and by table what this rank holds: a variable, and the shard's first row in it."""

    plan: Plan
    here: Mapping[int, tuple[Any, int]]

    def dense_slice(self, table_id: int) -> HeldSlice:
        """What this rank holds of a dense table, which is something."""
        variable, first_row = self.here[table_id]
        shard: Any = self.plan.shard(table_id, comm.current().rank)
        return HeldSlice(slice_of(shard), as_tf_table(variable), first_row)


def slice_of(shard: Shard) -> TableSlice:
    """A shard of a plan as a slice of its table."""
    return TableSlice((shard.row_start, shard.column_start), (shard.row_stop, shard.column_stop))


def get_tables(held: Held, all_ranks: bool) -> list[Any]:
    """All whole tables on rank 0 or on all ranks; an empty list elsewhere."""
    wholes = [get_table(held, table.table_id, all_ranks) for table in held.plan.tables]
    return wholes if all_ranks or comm.current().rank == 0 else []


def get_table(held: Held, table_id: int, all_ranks: bool) -> Any:
    """A whole table on rank 0 or on all ranks; None elsewhere."""
    plan, here = held
    if plan.kinds[table_id] == HASHED:
        variable = here[table_id][0]
        snapshot = variable.snapshot(with_slots=False)
        content = snapshot.keys.numpy(), snapshot.rows.numpy()
        return hash_weights.gather_by_key(variable, *content, all_ranks)
    communicator = comm.current()
    receive = all_ranks or communicator.rank == 0
    table = plan.tables[table_id]
    own_slice: Any = held.dense_slice(table_id) if table_id in here else None
    if plan.kinds[table_id] == DATA_PARALLEL or communicator.world_size == 1:
        return own_slice.read(own_slice.place).numpy() if receive else None
    # A rank without a shard does not know the table's dtype, but must send an empty block of it.
    own_type = 0 if own_slice is None else own_slice.variable.dtype.base_dtype.as_datatype_enum
    types = exchange_order.collective_in_turn(
        communicator, "all_gather", tf.constant([own_type], tf.int32), "dmp_table_dtype"
    )
    dtype = tf.as_dtype(int(tf.reduce_max(types)))
    whole: Any = (
        np.empty([table.input_dim, table.output_dim], dtype.as_numpy_dtype) if receive else None
    )
    rows = max(1, CHUNK_BYTES // (table.output_dim * dtype.size))
    for start in range(0, table.input_dim, rows):
        chunk = TableSlice((start, 0), (min(start + rows, table.input_dim), table.output_dim))
        block = np.zeros([0], dtype.as_numpy_dtype)
        common = own_slice and own_slice.place.common(chunk)
        if common and common.size:
            block = own_slice.read(common).numpy().reshape(-1)
        received = send(block, communicator, all_ranks)
        at = 0
        for shard in plan.shards_of(table_id) if receive else ():
            common = slice_of(shard).common(chunk)
            whole[common.slices] = received[at : at + common.size].reshape(common.shape)
            at += common.size
    return whole


def set_tables(held: Held, weights: Sequence[Any], chunk: int, use_lock: bool) -> None:
    """Sets this rank's shards from whole tables; see `DistributedEmbedding.set_weights`."""
    communicator = comm.current()
    sources: list[Any] = []

    def check():
        check_integer("chunk", chunk)
        sources.extend(_open(held, weights))

    def copy():
        for table_id, (variable, _) in held.here.items():
            if held.plan.kinds[table_id] == HASHED:
                replace_rows(variable, *sources[table_id], chunk)
            else:
                copy_shard(held, table_id, sources[table_id], chunk)

    all_or_none(check, communicator)
    one_rank_at_a_time(copy, communicator, use_lock)


def copy_shard(held: Held, table_id: int, source: np.ndarray, chunk: int) -> None:
    """Copies this rank's shard out of a whole dense table, `chunk` elements at a time."""
    own_slice = held.dense_slice(table_id)
    for rows in own_slice.place.by_rows(max(1, chunk // own_slice.place.shape[1])):
        own_slice.write(rows, np.ascontiguousarray(source[rows.slices]))


def _open(held, weights):
    """The weights as arrays, in memory or mapped; ValueError unless they fit the tables."""
    plan, here = held
    rule = f"`weights` must hold {len(plan.tables)} tables, one per embedding. Received: "
    if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
        raise ValueError(f"{rule}{weights!r}")
    weights = list(weights)
    if len(weights) != len(plan.tables):
        raise ValueError(f"{rule}{len(weights)}")
    arrays = []
    for table, weight in zip(plan.tables, weights, strict=True):
        what = f"weights[{table.table_id}]"
        if table.hashed:
            keys, rows = hash_weights.open_pair(what, weight, table.output_dim)
            hash_weights.check_capacity(what, here[table.table_id][0], keys)
            arrays.append((keys, rows))
        else:
            arrays.append(open_whole(what, weight, table))
    return arrays


def open_whole(what: str, array: Any, table: TableConfig) -> np.ndarray:
    """An array or `.npy` file of a dense table's shape; ValueError if it has another."""
    array = hash_weights.as_array(what, array)
    if array.shape != (table.input_dim, table.output_dim):
        raise ValueError(
            f"`{what}` must have the shape ({table.input_dim}, {table.output_dim}). "
            f"Received: shape {array.shape}"
        )
    hash_weights.check_real(what, array)
    return array
