"""Which optimizer trains a table: one at a time, and perhaps one of the table's own.

A stock optimizer has its own moments for each variable. Those of a table lie beside its rows, so an
optimizer must not continue with what another one left there:

    the first optimizer of a table           owns it
    another one, new to the table            takes it over: slot rows get their initial values
    one that lost the table, or              raises: its own moments are gone
    two in one function or graph

Tables may have optimizers of their own: `OptimizerWrapper({"users": ...}, default=...)`.

    gradients of "users" -> its optimizer        other tables, ordinary variables -> the default

All of them count the default's steps, so schedules go on together after a load. Beyond its rule, an
optimizer of a table has a learning rate only; everything else lies beside the rows.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.framework.graphs import counter
from sok_like.table.variable import is_embedding_variable, unwrap

_TWO_OPTIMIZERS = (
    "EmbeddingVariable '{table}' must be trained by one optimizer at a time: the optimizer's state "
    "is stored with the rows. Received: a step of optimizer '{optimizer}', {why}. Use one "
    "optimizer for the table, or a table for each"
)
_TAKEN = "after another optimizer has taken the table over"
_TOGETHER = "in a function or graph in which another optimizer trains the table, too"


class Owner:
    """Represents an optimizer, whose views share it. Counts tables that others have taken over."""


class _Training:
    """A table's present and former optimizers."""

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self.optimizer = ""  # its name, which `repr` of the table shows
        self.graph: Any = None  # weak; the outermost graph of the owner's last step
        self.former: weakref.WeakSet[Owner] = weakref.WeakSet()


def take(optimizer: Any, variables: Sequence[Any]) -> list[tf.Operation]:
    """Makes `optimizer` the owner of tables, or raises; returns ops to run before their update."""
    if not variables:
        return []
    owner, name = optimizer.__dict__.setdefault("_sok_owner", Owner()), optimizer._sok_name()
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph  # the outermost function or graph
    with tf.init_scope():
        in_session = not tf.executing_eagerly()
        for variable in variables:
            _take(owner, variable, graph, in_session, name)
        if in_session or graph is None:
            return []
        lost = counter(owner, "lost_tables")
        before = lost.numpy()
    tables = ", ".join(variable.table_name for variable in variables)
    message = _TWO_OPTIMIZERS.format(table=tables, optimizer=name, why=_TAKEN)
    # Fails if a table is lost between now and the function's run.
    return [tf.raw_ops.Assert(condition=tf.equal(lost, before), data=[message])]


def _take(owner, variable, graph, in_session, name):
    training = variable.__dict__.setdefault("_training", _Training())
    if training.owner not in (owner, None):
        together = None not in (graph, training.graph) and training.graph() is graph
        if together or in_session or owner in training.former:
            received = {"table": variable.table_name, "optimizer": name}
            why = _TOGETHER if together or in_session else _TAKEN
            raise RuntimeError(_TWO_OPTIMIZERS.format(**received, why=why))
        former = training.owner
        variable.load_snapshot(variable.snapshot(with_slots=False))
        training.former.add(former)
        counter(former, "lost_tables").assign_add(1)
        variable.__dict__["_training"] = training  # load_snapshot removes it
    training.owner, training.optimizer = owner, name
    training.graph = None if graph is None else weakref.ref(graph)


def key_of(tables: Mapping[str, Any], name: str) -> str | None:
    """The key for a table: its whole name, or the part of it after a slash; None without one."""
    keys = [key for key in tables if name == key or name.endswith(f"/{key}")]
    if len(keys) > 1:
        raise unmet("A table", "have one optimizer", f"{sorted(keys)} for table '{name}'")
    return keys[0] if keys else None


def check_keys(optimizer: Any, variables: Iterable[Any]) -> None:
    """Raises ValueError for a key that names no table; for the first variables only."""
    tables = optimizer._sok_tables
    if not tables or vars(optimizer).get("_sok_keys_checked"):
        return
    names = [unwrap(v).table_name for v in variables if is_embedding_variable(v)]
    unknown = set(tables) - {key_of(tables, name) for name in names}
    if unknown:
        raise ValueError(
            "The keys of `optimizer` must name tables that are trained, by their whole names or "
            f"the part after a slash: {sorted(names)}. Received: {sorted(unknown)}"
        )
    optimizer.__dict__["_sok_keys_checked"] = True


def divide(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> tuple[list, list]:
    """Splits (gradient, variable) pairs: a list of (optimizer, its pairs), and the default's."""
    tables = optimizer._sok_tables
    by_key: dict[str | None, list] = {None: [], **{key: [] for key in tables}}
    for gradient, variable in pairs:
        is_table = bool(tables) and is_embedding_variable(variable)
        key = key_of(tables, unwrap(variable).table_name) if is_table else None
        by_key[key].append((gradient, variable))
    for of_table in tables.values():
        of_table.__dict__["_iterations"] = optimizer._iterations
    return [(tables[key], by_key[key]) for key in tables if by_key[key]], by_key[None]
