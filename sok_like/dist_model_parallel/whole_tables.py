"""Whole tables out of their slices, and slices out of whole tables, some rows at a time.

    get    dense   each rank reads the chunk's rows of its slice =floats=> rank 0 (or all) puts
                   them into an array [input_dim, output_dim]
           hash    each rank's keys and rows, in chunks =keys, floats=> rank 0 (or all) sorts them
    set            each rank takes its part out of the whole: nothing is sent

Files are memory-mapped, so a rank reads only its own slices. A hash table is a pair of keys and
rows, sorted by key, so it does not depend on the number of ranks. A slot variable has the shape of
its variable, so it is read and written like weights. A hash table stores its slot rows beside its
rows, under the core's names. `spread_for_export` gives the slices to `sok.export_saved_model`.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.dist_model_parallel.dense_tables import held_slice, slot_objects
from sok_like.dist_model_parallel.local_layers import layer_table
from sok_like.lookup import exporting
from sok_like.planner.tables import DATA_PARALLEL, HASHED, TableConfig
from sok_like.runtime.checks import as_integer, check_integer, unmet
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none, send
from sok_like.saving.format import durable
from sok_like.table.content import TableContent, slot_fields, slots_by_name
from sok_like.table.keys import in_key_dtype, owned
from sok_like.table.slices import HeldSlice, TableSlice
from sok_like.table.snapshots import replace_rows

CHUNK_BYTES = 64 * 2**20  # of a table that a rank sends at once


class WholeTables:
    """Reads and writes whole tables: collective, eager methods, which make missing variables."""

    strategy: Any
    build: Any
    shards_here: Any

    def get_weights(self, all_ranks: bool = False) -> list[Any]:
        """The whole tables; every rank must call this.

        Args:
            all_ranks: True returns them on all ranks, False on rank 0 only.

        Returns:
            One array `[input_dim, output_dim]` per embedding, in the order of `embeddings`; for a
            hash table a pair of ascending keys `[num_keys]` and rows `[num_keys, output_dim]`. On
            the other ranks an empty list.
        """
        here, tables = self._held(), []
        for table in self.strategy.plan.tables:
            held: Any = here.get(table.table_id)
            if table.hashed:
                snapshot = held.snapshot(with_slots=False)
                keys, rows = snapshot.keys.numpy(), snapshot.rows.numpy()
                tables.append(_gather_by_key(held, keys, rows, all_ranks))
            else:
                tables.append(_gather(held, table, all_ranks))
        return tables if all_ranks or comm.current().rank == 0 else []

    def set_weights(
        self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the tables; every rank must call this, with the same weights.

        Args:
            weights: One array `[input_dim, output_dim]` per embedding, in the order of
                `embeddings`, or the path of its `.npy` file, from which each rank reads only its
                shard. For a hash table a pair of keys and rows; it then holds exactly these keys.
            chunk: Number of elements to copy at a time, rounded down to whole rows, at least one.
            use_lock: True: one rank at a time.

        Raises:
            ValueError: on any rank a number of weights or a shape is wrong, a key is a duplicate,
                or there are more keys than a rank's capacity; all ranks raise, and nothing has
                changed.
        """
        here, plan = self._held(), self.strategy.plan

        def opened():
            required = f"hold {len(plan.tables)} tables, one per embedding"
            if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
                raise unmet("`weights`", required, repr(weights))
            values = list(weights)
            if len(values) != len(plan.tables):
                raise unmet("`weights`", required, len(values))
            writes = []
            for table, value in zip(plan.tables, values, strict=True):
                what, held = f"weights[{table.table_id}]", here.get(table.table_id)
                if not table.hashed:
                    writes += _dense_writes(what, value, table, held, chunk)
                    continue
                keys, rows = _open_pair(what, value, table.output_dim)
                capacity, num_keys = held.get_config()["capacity"], len(owned(keys))
                if capacity is not None and num_keys > capacity:
                    required = f"hold at most {capacity=} keys per rank"
                    raise unmet(f"`{what}`", required, num_keys, f"table '{held.table_name}'")
                writes.append(functools.partial(replace_rows, held, keys, rows, chunk))
            return writes

        _write(opened, chunk, use_lock)

    def get_optimizer_state(self, optimizer: Any, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state of the whole tables; every rank must call this.

        Args:
            optimizer: The optimizer of the tables, of Keras 3 or tf_keras, wrapped or not.
            all_ranks: True returns the state on all ranks, False on rank 0 only.

        Returns:
            `"iterations"`, the number of steps, and `"tables"`, one dictionary per embedding from
            the name of a slot variable (`"momentums"`, `"accumulators"`, ...) to an array
            `[input_dim, output_dim]`; for a hash table to a pair of ascending keys `[num_keys]` and
            slot rows `[num_keys, width]`, in which NaN stands for the optimizer's initial value. On
            the other ranks an empty dictionary.

        Raises:
            ValueError: the optimizer does not know a table, on any rank; all ranks raise.
        """
        here, tables = self._held(), []
        for table, slots in zip(self.strategy.plan.tables, self._slots(optimizer), strict=True):
            if table.hashed:
                tables.append(_get_hash_slots(here[table.table_id], all_ranks))
            else:
                tables.append({k: _gather(slot, table, all_ranks) for k, slot in slots.items()})
        if not all_ranks and comm.current().rank != 0:
            return {}
        return {"iterations": int(tf.convert_to_tensor(optimizer.iterations)), "tables": tables}

    def set_optimizer_state(
        self, optimizer: Any, state: Any, chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the optimizer's state of the tables; every rank must call this, with the same state.

        Args:
            optimizer: The optimizer of the tables, already built: `optimizer.build(variables)`.
            state: The result of `get_optimizer_state`; paths of `.npy` files may replace arrays.
                The keys of a hash table must be those that it holds, so set weights first.
            chunk, use_lock: As in `set_weights`.

        Raises:
            ValueError: structure, slot variables, shapes or keys are wrong on any rank; all ranks
                raise, and nothing has changed.
        """
        here, plan, known = self._held(), self.strategy.plan, self._slots(optimizer)

        def opened():
            rule = '{"iterations": an integer, "tables": one dictionary per embedding}'
            if not isinstance(state, Mapping) or set(state) != {"iterations", "tables"}:
                raise ValueError(f"`state` must be {rule}. Received: {state!r:.80}")
            iterations, tables = as_integer(state["iterations"]), list(state["tables"])
            if iterations is None or iterations < 0 or len(tables) != len(plan.tables):
                raise ValueError(
                    f"`state` must be {rule}, of which there are {len(plan.tables)}. Received: "
                    f"iterations={state['iterations']!r} and {len(tables)} dictionaries"
                )
            writes = []
            for table, slots, of_table in zip(plan.tables, tables, known, strict=True):
                what = f'state["tables"][{table.table_id}]'
                if table.hashed:
                    writes += _hash_slot_writes(what, slots, here[table.table_id], iterations)
                    continue
                if sorted(slots) != list(of_table):
                    required = f"hold the optimizer's slot variables, {list(of_table)}"
                    raise unmet(f"`{what}`", required, sorted(slots))
                for name, value in slots.items():
                    label = f'{what}["{name}"]'
                    writes += _dense_writes(label, value, table, of_table[name], chunk)
            return writes

        _write(opened, chunk, use_lock)
        optimizer.iterations.assign(state["iterations"])

    def spread_for_export(self) -> dict[str, exporting.Spread]:
        """This layer's dense tables that `sok.export_saved_model` replaces, as `table_<id>`."""
        if comm.current().world_size == 1:
            return {}
        here, plan, spread = self._held(), self.strategy.plan, {}

        def read(held, start, stop):
            first = held.place.begin[0]
            return held.read(held.place.rows(first + start, first + stop))

        for table, kind in zip(plan.tables, plan.kinds, strict=True):
            if kind in (DATA_PARALLEL, HASHED):
                continue
            of_slice: tuple = ()
            if (held := here.get(table.table_id)) is not None:
                place, dtype = held.place, held.variable.dtype.base_dtype
                of_slice = dtype, place.begin, place.shape[0], functools.partial(read, held)
            shape = table.input_dim, table.output_dim
            spread[f"table_{table.table_id}"] = exporting.Spread(shape, *of_slice)
        return spread

    def _held(self) -> dict[int, Any]:
        """By table, what this rank holds: a HeldSlice, or the EmbeddingVariable of a hash table."""
        self.build()
        return {
            table_id: layer_table(layer)
            if shard.kind == HASHED
            else held_slice(shard, layer.weights[0])
            for table_id, (shard, layer) in self.shards_here().items()
        }

    def _slots(self, optimizer) -> list[dict[str, HeldSlice | None]]:
        """By table and name, this rank's slices of slot variables; None where it has none."""
        own: dict[int, dict[str, HeldSlice]] = {}
        tables = self.strategy.plan.tables

        def find():
            for table_id, (shard, layer) in self.shards_here().items():
                variable = layer.weights[0]
                if shard.kind == HASHED or not variable.trainable:
                    continue
                slots = slot_objects(optimizer, variable)
                if slots is None:
                    raise ValueError(
                        "`optimizer` must know the layer's variables: call its build(model."
                        f"trainable_variables), or train a step. Received: {optimizer.name} "
                        f"without '{variable.name}'"
                    )
                own[table_id] = {k: held_slice(shard, slot) for k, slot in slots.items()}
            return [list(own.get(table.table_id, {})) for table in tables]

        by_rank = agreed(find, comm.current(), raises=ValueError)
        names = [sorted({*itertools.chain(*lists)}) for lists in zip(*by_rank, strict=True)]
        return [
            {name: own.get(table.table_id, {}).get(name) for name in of_table}
            for table, of_table in zip(tables, names, strict=True)
        ]


def _gather(held: Any, table: TableConfig, all_ranks: bool) -> Any:
    """A whole dense table on rank 0 or on all ranks, out of the ranks' slices; None elsewhere."""
    communicator = comm.current()
    receive = all_ranks or communicator.rank == 0
    whole = TableSlice((0, 0), (table.input_dim, table.output_dim))
    # A rank without a slice must know the dtype, too: it sends empty blocks.
    own = held and (*held.place, held.variable.dtype.base_dtype.as_datatype_enum)
    by_rank = agreed(lambda: own, communicator)
    slices = [TableSlice(*map(tuple, of_rank[:2])) for of_rank in by_rank if of_rank]
    if slices == [whole] * len(by_rank):  # it is replicated, or there is one rank
        return held.read(whole).numpy() if held and receive else None
    dtype = tf.as_dtype(max(of_rank[2] for of_rank in by_rank if of_rank)).as_numpy_dtype
    result: Any = np.empty(whole.shape, dtype) if receive else None
    row_bytes = whole.shape[1] * np.dtype(dtype).itemsize
    for chunk in whole.by_rows(max(1, CHUNK_BYTES // row_bytes)):
        block = np.zeros([0], dtype)
        common = held and held.place.common(chunk)
        if held and common.size:
            block = held.read(common).numpy().reshape(-1)
        received = send(block, communicator, all_ranks)
        for of_rank in slices if receive else ():
            common = of_rank.common(chunk)
            block, received = np.split(received, [common.size])
            result[common.slices] = block.reshape(common.shape)
    return result


def _gather_by_key(variable, keys, rows, all_ranks):
    """Keys and rows of all ranks, sorted by key, on rank 0 or on all ranks; None elsewhere."""
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


def _get_hash_slots(variable, all_ranks):
    snapshot = variable.snapshot()
    keys, own = snapshot.keys.numpy(), slots_by_name(snapshot)
    # A rank has no slot variables until its first update.
    own_widths = [(name, rows.shape[1]) for name, rows in own.items()]
    widths = dict(max(agreed(lambda: own_widths, comm.current()), key=len))
    if not widths:
        return {}
    rows = [
        own[name] if name in own else np.full([len(keys), width], np.nan, np.float32)
        for name, width in widths.items()
    ]
    whole = _gather_by_key(variable, keys, np.concatenate(rows, axis=1), all_ranks)
    if whole is None:
        return {}
    parts = np.split(whole[1], np.cumsum([*widths.values()])[:-1], axis=1)
    return {name: (whole[0], part) for name, part in zip(widths, parts, strict=True)}


def _write(opened: Callable[[], list[Callable]], chunk: int, use_lock: bool) -> None:
    """Calls the functions that `opened` returns, unless it raises on any rank."""
    communicator = comm.current()

    def checked():
        check_integer("chunk", chunk)
        return opened()

    writes = all_or_none(checked, communicator)

    def run():
        for write in writes:
            write()

    if not use_lock:
        return run()
    for rank in range(communicator.world_size):
        # A rank that fails says so in its turn, so the others do not wait for it.
        all_or_none(run if rank == communicator.rank else None, communicator)


def _dense_writes(what, value, table, held, chunk):
    """What sets this rank's slice, `chunk` elements at a time; ValueError unless it fits."""
    array = _as_array(what, value)
    if array.shape != (table.input_dim, table.output_dim):
        required = f"have the shape ({table.input_dim}, {table.output_dim})"
        raise unmet(f"`{what}`", required, f"shape {array.shape}")

    def write():
        for rows in held.place.by_rows(max(1, chunk // held.place.shape[1])):
            held.write(rows, np.ascontiguousarray(array[rows.slices]))

    return [] if held is None else [write]


def _hash_slot_writes(what, slots, variable, step):
    """What sets the slot rows of this rank's keys; ValueError unless they fit."""
    snapshot = variable.snapshot()
    present = np.sort(snapshot.keys.numpy())
    names, own = sorted(slots_by_name(snapshot)), {}
    if names and slots and names != sorted(slots):
        raise unmet(f"`{what}`", f"hold the table's slot variables, {names}", sorted(slots))
    for name, pair in slots.items():
        label = f'{what}["{name}"]'
        keys, rows = _open_pair(label, pair)
        of_rank = owned(keys)
        of_rank = of_rank[np.argsort(keys[of_rank])]
        if not np.array_equal(keys[of_rank], present):
            required = f"have the keys of table '{variable.table_name}': set its weights first"
            received = f"{len(of_rank)} keys for a rank that holds {len(present)}"
            raise unmet(f"`{label}`", required, received)
        own[name] = rows, of_rank

    def write():
        fields = slot_fields({name: rows[of_rank] for name, (rows, of_rank) in own.items()})
        content = TableContent(present, variable.find(present)[0], **fields, optimizer_step=step)
        variable.load_snapshot(content, replace=False)

    return [write] if own else []


def _open_pair(what: str, pair: Any, width: Any = "width") -> tuple[np.ndarray, np.ndarray]:
    """Checks and opens keys, int64 `[num_keys]`, and rows, which may stay on disk."""
    rule = f"`{what}` of a hash table must be a pair (keys [n], rows [n, {width}])"
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{rule}. Received: {type(pair).__name__}")
    keys, rows = (_as_array(what, item) for item in pair)
    if keys.ndim != 1 or not (np.issubdtype(keys.dtype, np.integer) or keys.size == 0):
        raise ValueError(f"{rule}. Received: keys of shape {keys.shape} and dtype {keys.dtype}")
    if rows.ndim != 2 or len(rows) != len(keys) or width not in ("width", rows.shape[1]):
        raise ValueError(f"{rule}. Received: {len(keys)} keys and rows of shape {rows.shape}")
    keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
    if len(np.unique(keys)) != len(keys):
        raise ValueError(f"{rule}, each key once. Received: duplicate keys")
    return keys, rows


def _as_array(what: str, array: Any) -> np.ndarray:
    """Numbers of an array, or of an `.npy` file, mapped into memory if it is local."""
    if isinstance(array, (str, os.PathLike)):
        path, required = os.fspath(array), "be an array or the path of an .npy file"
        try:
            place = durable.local(path)
            if place is not None:
                array = np.load(place, mmap_mode="r", allow_pickle=False)
            else:
                with durable.open_to_read(path) as file:
                    array = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise unmet(f"`{what}`", required, f"{path!r}", f"{error}") from error
    array = array if isinstance(array, np.ndarray) else np.asarray(array)
    if array.dtype.kind not in "fiub" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise ValueError(f"`{what}` must hold real numbers. Received: {array.dtype}")
    return array
