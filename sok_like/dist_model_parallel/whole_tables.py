"""Weights of a distributed layer, and their optimizer state, as whole tables.

A slot variable has the shape of its variable. So it is sharded like the table, and is read and
written like weights. A hash table stores its slot rows beside its rows, under the core's names.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.dist_model_parallel import weights
from sok_like.dist_model_parallel.dense_tables import slot_objects, spread_tables
from sok_like.dist_model_parallel.local_layers import layer_table
from sok_like.dist_model_parallel.weights import Held, set_tables
from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.planner.tables import HASHED
from sok_like.runtime.checks import as_integer, check_integer, unmet
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none, one_rank_at_a_time
from sok_like.table.content import TableContent, slot_fields, slots_by_name
from sok_like.table.keys import owned


class WholeTables:
    """Reads and writes whole tables: collective, eager methods, which make missing variables."""

    strategy: Any
    _tables: Any
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
        self.build()
        held, ids = self._held(), range(len(self._tables))
        tables = [weights.get_table(held, table_id, bool(all_ranks)) for table_id in ids]
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
        self.build()
        set_tables(self._held(), weights, chunk, bool(use_lock))

    def get_optimizer_state(self, optimizer: Any, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state of the whole tables; every rank must call this.

        Args:
            optimizer: The optimizer of the tables, of Keras 3 or tf_keras, wrapped or not.
            all_ranks: True returns the state on all ranks, False on rank 0 only.

        Returns:
            `"iterations"`, the number of steps, and `"tables"`, one dictionary per embedding from
            the name of a slot variable (`"momentums"`, `"accumulators"`, ...) to an array
            `[input_dim, output_dim]`; for a hash table to a pair of ascending keys `[num_keys]` and
            slot rows `[num_keys, width]`. On the other ranks an empty dictionary.

        Raises:
            ValueError: the optimizer does not know a table, on any rank; all ranks raise.
        """
        self.build()
        plan, here = self._held()
        own_slots, names = _known_slots(plan, here, optimizer)
        tables = []
        for table in plan.tables:
            table_id, state = table.table_id, {}
            if table.hashed:
                state = _get_hash_slots(here[table_id], bool(all_ranks))
            for name in names[table_id]:
                slot = own_slots.get(table_id, {}).get(name)
                slots = Held(plan, {} if slot is None else {table_id: slot})
                state[name] = weights.get_table(slots, table_id, bool(all_ranks))
            tables.append(state)
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
        self.build()
        (plan, here), communicator = self._held(), comm.current()
        own_slots, names = _known_slots(plan, here, optimizer)

        def opened():
            check_integer("chunk", chunk)
            return _open(plan, here, names, state)

        def copy():
            for table_id, variable in here.items():
                if plan.tables[table_id].hashed:
                    _set_hash_slots(variable, sources[table_id], state["iterations"])
                for name, slot in own_slots.get(table_id, {}).items():
                    source = sources[table_id][name]
                    weights.copy_shard(Held(plan, {table_id: slot}), table_id, source, chunk)

        sources = all_or_none(opened, communicator)
        one_rank_at_a_time(copy, communicator, bool(use_lock))
        optimizer.iterations.assign(state["iterations"])

    def spread_for_export(self) -> dict[str, exporting.Spread]:
        """This layer's dense tables that `sok.export_saved_model` replaces."""
        self.build()
        return spread_tables(self) if comm.current().world_size > 1 else {}

    def _held(self) -> Held:
        """What this rank holds, as Keras' variables; hash tables as EmbeddingVariables."""
        here = {
            table_id: layer_table(layer) if shard.kind == HASHED else layer.weights[0]
            for table_id, (shard, layer) in self.shards_here().items()
        }
        return Held(self.strategy.plan, here)


def _known_slots(plan, here, optimizer):
    """This rank's slot variables by table and name, and for each table the names on any rank."""
    own_slots: dict[int, dict[str, Any]] = {}

    def find():
        for table_id, variable in here.items():
            if not plan.tables[table_id].hashed and variable.trainable:
                slots = slot_objects(optimizer, variable)
                if slots is None:
                    raise ValueError(
                        "`optimizer` must know the layer's variables: call its build(model."
                        f"trainable_variables), or train a step. Received: {optimizer.name} "
                        f"without '{variable.name}'"
                    )
                own_slots[table_id] = {name: as_tf_table(slot) for name, slot in slots.items()}
        return [list(own_slots.get(table.table_id, {})) for table in plan.tables]

    by_rank = agreed(find, comm.current(), raises=ValueError)
    names = (itertools.chain(*of_table) for of_table in zip(*by_rank, strict=True))
    return own_slots, [sorted(set(of_table)) for of_table in names]


def _get_hash_slots(variable, all_ranks):
    snapshot = variable.snapshot()
    # A rank without keys has no slot rows, and no slot variables until its first update.
    own_widths = [(name, rows.shape[1]) for name, rows in slots_by_name(snapshot).items()]
    widths = dict(max(agreed(lambda: own_widths, comm.current()), key=len))
    keys = snapshot.keys.numpy()
    rows = snapshot.slot_rows.numpy().reshape(len(keys), sum(widths.values()))
    whole = weights.gather_by_key(variable, keys, rows, all_ranks)
    if whole is None:
        return {}
    parts = np.split(whole[1], np.cumsum(list(widths.values()))[:-1], axis=1) if widths else []
    return {name: (whole[0], part) for name, part in zip(widths, parts, strict=True)}


def _open(plan, here, names, state):
    """By table, each slot variable's array or `(keys, rows)`; ValueError if they do not fit."""
    rule = '`state` must be {"iterations": an integer, "tables": one dictionary per embedding}'
    if not isinstance(state, Mapping) or set(state) != {"iterations", "tables"}:
        raise ValueError(f"{rule}. Received: {state!r:.80}")
    iterations, tables = as_integer(state["iterations"]), list(state["tables"])
    if iterations is None or iterations < 0 or len(tables) != len(plan.tables):
        raise ValueError(
            f"{rule}, of which there are {len(plan.tables)}. Received: "
            f"iterations={state['iterations']!r} and {len(tables)} dictionaries"
        )
    opened = []
    for table, slots in zip(plan.tables, tables, strict=True):
        what = f'state["tables"][{table.table_id}]'
        if table.hashed:
            opened.append(_open_hash_slots(what, slots, here[table.table_id]))
            continue
        if sorted(slots) != names[table.table_id]:
            required = f"hold the optimizer's slot variables, {names[table.table_id]}"
            raise unmet(f"`{what}`", required, sorted(slots))
        items = slots.items()
        opened.append({k: weights.open_whole(f'{what}["{k}"]', v, table) for k, v in items})
    return opened


def _open_hash_slots(what, slots, variable):
    """By name, the rows of this rank's keys in ascending order, and these keys."""
    snapshot = variable.snapshot()
    present = np.sort(snapshot.keys.numpy())
    names, opened = sorted(slots_by_name(snapshot)), {}
    if names and slots and names != sorted(slots):
        raise unmet(f"`{what}`", f"hold the table's slot variables, {names}", sorted(slots))
    for name, pair in slots.items():
        label = f'{what}["{name}"]'
        shape = weights.as_array(label, pair[1]).shape if len(pair) == 2 else (0,)
        keys, rows = weights.open_pair(label, pair, shape[-1])
        of_rank = owned(keys)
        of_rank = of_rank[np.argsort(keys[of_rank])]
        if not np.array_equal(keys[of_rank], present):
            required = f"have the keys of table '{variable.table_name}': set its weights first"
            received = f"{len(of_rank)} keys for a rank that holds {len(present)}"
            raise unmet(f"`{label}`", required, received)
        opened[name] = present, rows, of_rank
    return opened


def _set_hash_slots(variable, slots, step):
    if slots:
        keys = next(iter(slots.values()))[0]
        slots = {name: rows[of_rank] for name, (_, rows, of_rank) in slots.items()}
        rows, _ = variable.find(keys)
        content = TableContent(keys, rows, **slot_fields(slots), optimizer_step=step)
        variable.load_snapshot(content, replace=False)
