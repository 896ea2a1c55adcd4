"""Reads and writes the optimizer's state of distributed tables, as whole tables.

A slot variable has the shape of its variable. So it is sharded like the table, and is read and
written like weights. Optimizers of both Kerases keep slot variables in lists with one item per
trained variable: an attribute such as `_momentums` has a slot variable of every table. The state
uses its name without underscores. A hash table stores its slot rows beside its rows, under the
core's names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.dist_model_parallel import hash_weights, weights
from sok_like.dist_model_parallel.weights import Held
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.local_variables import is_local
from sok_like.runtime.checks import as_integer, check_integer
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import all_or_none, gather_text, one_rank_at_a_time
from sok_like.table.keys import owned


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """The slot variables of one variable of an optimizer that have its shape, by name."""
    found = slot_objects(optimizer, variable)
    if found is None:
        raise ValueError(
            f"`optimizer` must know the layer's variables: call its build(model."
            f"trainable_variables), or train a step. Received: {optimizer.name} without "
            f"'{variable.name}'"
        )
    return {name: as_tf_table(item) for name, item in found.items()}


def slot_objects(optimizer: Any, variable: Any) -> dict[str, Any] | None:
    """As `slots_of`, but the optimizer's own objects; None if it does not know the variable.

    Slot variables of another shape stay with the optimizer if all ranks have the same.
    """
    optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    places = getattr(optimizer, "_index_dict", None)  # tf_keras; Keras 3 has the attribute below
    if places is None:
        places = getattr(optimizer, "_trainable_variables_indices", None)
    key = optimizer._var_key(variable) if places else None
    if not places or key not in places:
        return None
    found = {}
    for attribute, items in vars(optimizer).items():
        if attribute == "_variables" or not isinstance(items, (list, tuple)):
            continue
        if len(items) != len(places) or attribute.startswith("_sok"):
            continue
        item = items[places[key]]
        if item is variable or not hasattr(item, "shape"):
            continue
        if tuple(item.shape) == tuple(variable.shape):
            found[attribute.strip("_")] = item
        elif is_local(variable):
            raise NotImplementedError(
                "Slot variables of the sharded tables of dist_model_parallel must have the tables' "
                f"shapes. Received: {type(optimizer).__name__}, whose {attribute} of "
                f"'{variable.name}' has the shape {tuple(item.shape)}"
            )
    return found


def _known_slots(held, optimizer, communicator):
    """This rank's slot variables by table and name, and for each table the names on any rank."""
    plan, here = held
    mine: dict[int, dict[str, Any]] = {}

    def find():
        for table_id, (variable, _) in here.items():
            if not plan.tables[table_id].hashed and variable.trainable:
                mine[table_id] = slots_of(optimizer, variable)

    all_or_none(find, communicator)
    names: list[set[str]] = [set() for _ in plan.tables]
    line = json.dumps({table_id: list(slots) for table_id, slots in mine.items()}) + "\n"
    for text in gather_text(line, communicator).splitlines():
        for table_id, of_table in json.loads(text).items():
            names[int(table_id)].update(of_table)
    return mine, [sorted(of_table) for of_table in names]


def get_state(held: Held, optimizer: Any, all_ranks: bool) -> dict[str, Any]:
    """See `DistributedEmbedding.get_optimizer_state`."""
    (plan, here), communicator = held, comm.current()
    mine, names = _known_slots(held, optimizer, communicator)
    tables = []
    for table in plan.tables:
        table_id, state = table.table_id, {}
        if table.hashed:
            state = _get_hash_slots(here[table_id][0], all_ranks)
        for name in names[table_id]:
            shard = {}
            if name in mine.get(table_id, {}):
                shard = {table_id: (mine[table_id][name], here[table_id][1])}
            state[name] = weights.get_table(Held(plan, shard), table_id, all_ranks)
        tables.append(state)
    if not all_ranks and communicator.rank != 0:
        return {}
    return {"iterations": int(tf.convert_to_tensor(optimizer.iterations)), "tables": tables}


def _get_hash_slots(variable, all_ranks):
    snapshot = variable.snapshot()
    # A rank without keys has no slot variables until its first update.
    described = list(zip(_names(snapshot), snapshot.slot_widths.numpy().tolist(), strict=True))
    told = gather_text(json.dumps(described) + "\n", comm.current()).splitlines()
    known = max((json.loads(text) for text in told), key=len)
    keys, width = snapshot.keys.numpy(), sum(size for _, size in known)
    # A rank without keys has no slot rows, whatever slot variables other ranks have.
    rows = snapshot.slot_rows.numpy().reshape(len(keys), width)
    whole = hash_weights.gather_by_key(variable, keys, rows, all_ranks)
    if whole is None:
        return {}
    ends = np.cumsum([size for _, size in known])[:-1]
    parts = np.split(whole[1], ends, axis=1) if known else []
    return {name: (whole[0], part) for (name, _), part in zip(known, parts, strict=True)}


def _names(snapshot):
    return [name.decode() for name in snapshot.slot_names.numpy().tolist()]


def set_state(held: Held, optimizer: Any, state: Any, chunk: int, use_lock: bool) -> None:
    """See `DistributedEmbedding.set_optimizer_state`."""
    (plan, here), communicator = held, comm.current()
    mine, names = _known_slots(held, optimizer, communicator)
    sources: list[dict[str, Any]] = []

    def check():
        check_integer("chunk", chunk)
        sources.extend(_open(held, names, state))

    all_or_none(check, communicator)

    def copy():
        for table_id, (variable, first_row) in here.items():
            if plan.tables[table_id].hashed:
                _set_hash_slots(variable, sources[table_id], state["iterations"])
            for name, slot in mine.get(table_id, {}).items():
                slots = Held(plan, {table_id: (slot, first_row)})
                weights.copy_shard(slots, table_id, sources[table_id][name], chunk)

    one_rank_at_a_time(copy, communicator, use_lock)
    optimizer.iterations.assign(state["iterations"])


def _open(held, names, state):
    """By table, each slot variable's array or `(keys, rows)`; ValueError if they do not fit."""
    plan, here = held
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
            opened.append(_open_hash_slots(what, slots, here[table.table_id][0]))
            continue
        if sorted(slots) != names[table.table_id]:
            raise ValueError(
                f"`{what}` must hold the optimizer's slot variables, {names[table.table_id]}. "
                f"Received: {sorted(slots)}"
            )
        items = slots.items()
        opened.append({k: weights.open_whole(f'{what}["{k}"]', v, table) for k, v in items})
    return opened


def _open_hash_slots(what, slots, variable):
    snapshot = variable.snapshot()
    present = np.sort(snapshot.keys.numpy())
    known, opened = _names(snapshot), {}
    if known and slots and sorted(known) != sorted(slots):
        raise ValueError(
            f"`{what}` must hold the table's slot variables, {sorted(known)}. "
            f"Received: {sorted(slots)}"
        )
    for name, pair in slots.items():
        label = f'{what}["{name}"]'
        shape = hash_weights.as_array(label, pair[1]).shape if len(pair) == 2 else (0,)
        keys, rows = hash_weights.open_pair(label, pair, shape[-1])
        mine = owned(keys)
        if not np.array_equal(np.sort(keys[mine]), present):
            raise ValueError(
                f"`{what}[\"{name}\"]` must have the keys of table '{variable.table_name}': set "
                f"its weights first. Received: {len(mine)} keys for a rank that holds "
                f"{len(present)}"
            )
        opened[name] = keys[mine], rows, mine
    return opened


def _set_hash_slots(variable, slots, step):
    if not slots:
        return
    (keys, _, _), *_ = slots.values()
    order = np.argsort(keys)
    keys, columns = keys[order], []
    for of_slot, rows, mine in slots.values():
        columns.append(np.asarray(rows[mine[np.argsort(of_slot)]], np.float32))
    variable.load_snapshot(
        keys=keys,
        rows=variable.find(keys)[0],
        slot_rows=np.concatenate(columns, axis=1),
        slot_names=np.array([name.encode() for name in slots], dtype=object),
        slot_widths=np.array([part.shape[1] for part in columns], np.int64),
        optimizer_step=step,
        replace=False,
    )
