"""Tables with optimizers of their own: `OptimizerWrapper({"users": ...}, default=...)`.

    gradients of "users" -> its optimizer        other tables, ordinary variables -> the default

All of them count the default's steps, so schedules go on together after a load. Beyond its rule, an
optimizer of a table has a learning rate only; everything else lies beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from sok_like.table.variable import is_embedding_variable, unwrap


def key_of(tables: Mapping[str, Any], name: str) -> str | None:
    """The key for a table: its whole name, or the part of it after a slash; None without one.

    Raises:
        ValueError: several keys name the table.
    """
    found = [key for key in tables if name == key or name.endswith(f"/{key}")]
    if len(found) > 1:
        raise ValueError(
            f"A table must have one optimizer. Received: {sorted(found)} for table '{name}'"
        )
    return found[0] if found else None


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
    """Splits (gradient, variable) pairs: those of each table's optimizer, and the default's.

    Returns:
        A list of (optimizer, pairs), and the other pairs.
    """
    tables, rest = optimizer._sok_tables, list[tuple[Any, Any]]()
    own: dict[str, list] = {key: [] for key in tables}
    for gradient, variable in pairs:
        key = None
        if tables and is_embedding_variable(variable):
            key = key_of(tables, unwrap(variable).table_name)
        (rest if key is None else own[key]).append((gradient, variable))
    for each in tables.values():
        each.__dict__["_iterations"] = optimizer._iterations
    return [(tables[key], found) for key, found in own.items() if found], rest


def to_config(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables' optimizers for `get_config`."""
    return {key: tf.keras.optimizers.serialize(each) for key, each in tables.items()}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_config`."""
    return {key: tf.keras.optimizers.deserialize(each) for key, each in config.items()}
