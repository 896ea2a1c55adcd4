"""Whole tables out of their shards, and shards out of whole tables, some rows at a time.

    get    dense   each rank reads the chunk's rows of its shards =floats=> rank 0 (or all) puts
                   them into an array [input_dim, output_dim]
           hash    each rank's keys and rows, in chunks =keys, floats=> rank 0 (or all) sorts them
    set            each rank takes its part out of the whole: nothing is sent

Files are memory-mapped, so a rank reads only its own shards. A hash table is a pair of keys and
rows, sorted by key, so it does not depend on the number of ranks.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.planner.tables import DATA_PARALLEL, HASHED, Plan, Shard, TableConfig
from sok_like.runtime.checks import check_integer, unmet
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none, one_rank_at_a_time, send
from sok_like.saving.format import durable
from sok_like.table.keys import in_key_dtype, owned
from sok_like.table.slices import HeldSlice, TableSlice
from sok_like.table.snapshots import replace_rows

# Bytes of a table that a rank sends at once.
CHUNK_BYTES = 64 * 2**20


class Held(NamedTuple):
    """A plan, and the variable with this rank's shard of each table that it holds some of."""

    plan: Plan
    here: Mapping[int, Any]

    def dense_slice(self, table_id: int) -> HeldSlice:
        """What this rank holds of a dense table, which is something."""
        shard: Any = self.plan.shard(table_id, comm.current().rank)
        return HeldSlice(slice_of(shard), as_tf_table(self.here[table_id]), shard.first_row)


def slice_of(shard: Shard) -> TableSlice:
    """A shard of a plan as a slice of its table."""
    return TableSlice((shard.row_start, shard.column_start), (shard.row_stop, shard.column_stop))


def get_table(held: Held, table_id: int, all_ranks: bool) -> Any:
    """A whole table on rank 0 or on all ranks; None elsewhere."""
    plan, here = held
    if plan.kinds[table_id] == HASHED:
        variable = here[table_id]
        snapshot = variable.snapshot(with_slots=False)
        return gather_by_key(variable, snapshot.keys.numpy(), snapshot.rows.numpy(), all_ranks)
    communicator = comm.current()
    receive = all_ranks or communicator.rank == 0
    own_slice: Any = held.dense_slice(table_id) if table_id in here else None
    if plan.kinds[table_id] == DATA_PARALLEL or communicator.world_size == 1:
        return own_slice.read(own_slice.place).numpy() if receive else None
    # A rank without a shard does not know the table's dtype, but must send an empty block of it.
    own_type = 0 if own_slice is None else own_slice.variable.dtype.base_dtype.as_datatype_enum
    dtype = tf.as_dtype(max(agreed(lambda: own_type, communicator))).as_numpy_dtype
    shape = plan.tables[table_id].input_dim, plan.tables[table_id].output_dim
    whole: Any = np.empty(shape, dtype) if receive else None
    row_bytes = shape[1] * np.dtype(dtype).itemsize
    for chunk in TableSlice((0, 0), shape).by_rows(max(1, CHUNK_BYTES // row_bytes)):
        block = np.zeros([0], dtype)
        common = own_slice and own_slice.place.common(chunk)
        if common and common.size:
            block = own_slice.read(common).numpy().reshape(-1)
        received = send(block, communicator, all_ranks)
        for shard in plan.shards_of(table_id) if receive else ():
            common = slice_of(shard).common(chunk)
            block, received = np.split(received, [common.size])
            whole[common.slices] = block.reshape(common.shape)
    return whole


def gather_by_key(variable, keys, rows, all_ranks):
    """Gathers keys and rows of all ranks, sorted by key, on rank 0 or all ranks; None elsewhere."""
    communicator = comm.current()
    if variable.key_dtype.size < 8:  # raises on all ranks if a key does not fit
        all_or_none(lambda: in_key_dtype(tf.constant(keys), variable), communicator)
    if communicator.world_size > 1:
        longest = max(agreed(lambda: len(keys), communicator))
        step = max(1, CHUNK_BYTES // (8 + rows.itemsize * rows.shape[1]))
        parts = [(keys[:0], rows[:0])]
        for start in range(0, longest, step):
            of_keys = send(keys[start : start + step], communicator, all_ranks)
            of_rows = send(rows[start : start + step].reshape(-1), communicator, all_ranks)
            parts.append((of_keys, of_rows.reshape(-1, rows.shape[1])))
        if not all_ranks and communicator.rank != 0:
            return None
        keys, rows = map(np.concatenate, zip(*parts, strict=True))
    keys = in_key_dtype(tf.constant(keys), variable).numpy()
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def set_tables(held: Held, weights: Sequence[Any], chunk: int, use_lock: bool) -> None:
    """Sets this rank's shards from whole tables; see `DistributedEmbedding.set_weights`."""
    communicator = comm.current()

    def opened():
        check_integer("chunk", chunk)
        return _open(held, weights)

    def copy():
        for table_id, variable in held.here.items():
            if held.plan.kinds[table_id] == HASHED:
                replace_rows(variable, *sources[table_id], chunk)
            else:
                copy_shard(held, table_id, sources[table_id], chunk)

    sources = all_or_none(opened, communicator)
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
        if not table.hashed:
            arrays.append(open_whole(what, weight, table))
            continue
        arrays.append(open_pair(what, weight, table.output_dim))
        variable, num_keys = here[table.table_id], len(owned(arrays[-1][0]))
        capacity = variable.get_config()["capacity"]
        if capacity is not None and num_keys > capacity:
            raise ValueError(
                f"`{what}` must hold at most capacity={capacity} keys per rank (table "
                f"'{variable.table_name}'). Received: {num_keys}"
            )
    return arrays


def open_whole(what: str, array: Any, table: TableConfig) -> np.ndarray:
    """An array or `.npy` file of a dense table's shape; ValueError if it has another."""
    array = as_array(what, array)
    if array.shape != (table.input_dim, table.output_dim):
        required = f"have the shape ({table.input_dim}, {table.output_dim})"
        raise unmet(f"`{what}`", required, f"shape {array.shape}")
    _check_real(what, array)
    return array


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
    _check_real(what, rows)
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
        required = "be an array or the path of an .npy file"
        raise unmet(f"`{what}`", required, f"{os.fspath(value)!r}", f"{error}") from error


def _check_real(what, array):
    if array.dtype.kind not in "fiub" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise ValueError(f"`{what}` must hold real numbers. Received: {array.dtype}")
