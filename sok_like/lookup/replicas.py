"""Variables that every rank holds: broadcasts them from one rank, or compares them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.local_variables import is_local, unique_in_graph
from sok_like.runtime.ranks import comm, exchange_order


def with_optimizer(variables: Iterable[Any], optimizer: Any) -> list[Any]:
    """A model's variables and its optimizer's, each once."""
    variables = list(variables)
    ids = {id(variable) for variable in variables}
    own = optimizer.variables
    own = own() if callable(own) else own
    return variables + [variable for variable in own if id(variable) not in ids]


def broadcast(variables: Iterable[Any], root_rank: int, name: str) -> list[Any]:
    """Gives variables of all ranks the values of one rank; skips those local to a rank.

    Variables and name are the same on all ranks. In a graph the returned assignments must be run.
    """
    communicator = comm.current()
    if communicator.world_size == 1:
        return []
    name = unique_in_graph(name)
    shared = [variable for variable in variables if not is_local(variable)]
    assignments = []
    for i, variable in enumerate(shared):
        value, turn = tf.convert_to_tensor(as_tf_table(variable)), f"{name}_{i}"
        value = exchange_order.exchange_in_turn(
            functools.partial(communicator.broadcast, value, root_rank, turn), turn, communicator
        )
        assignments.append(variable.assign(value))
    return assignments


def check_same_shapes(variables: Sequence[Any], name: str) -> None:
    """ValueError on all ranks unless all list variables of equal shapes and dtypes. Eager only."""
    communicator = comm.current()
    texts = [f"{v.dtype} {tuple(v.shape)}" for v in variables]
    codes = tf.constant([len(texts), *(zlib.crc32(text.encode()) for text in texts)], tf.int64)
    gathered = exchange_order.collective_in_turn(communicator, "all_gather", codes, name)
    gathered = gathered.numpy().tolist()
    lists = []
    while gathered:
        length = gathered[0]
        lists.append(gathered[1 : length + 1])
        gathered = gathered[length + 1 :]
    if all(other == lists[0] for other in lists):
        return
    differing = (i for i, codes in enumerate(zip(*lists, strict=False)) if len(set(codes)) > 1)
    first = next(differing, min(map(len, lists)))
    here = "missing"
    if first < len(texts):
        here = f"'{getattr(variables[first], 'path', variables[first].name)}', {texts[first]}"
    raise ValueError(
        "The ranks must have the same variables in the same order. Received: "
        f"{[len(other) for other in lists]} variables, by rank; the first that differs is number "
        f"{first}, which on rank {communicator.rank} is {here}"
    )
