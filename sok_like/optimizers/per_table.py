"""Tables with optimizers of their own: `OptimizerWrapper({"users": ...}, default=...)`.

    gradients of "users" -> its optimizer        other tables, ordinary variables -> the default

All of them count the default's steps, so schedules go on together after a load. Beyond its rule, an
optimizer of a table has a learning rate only; everything else lies beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sok_like.table.variable import is_embedding_variable, unwrap


def key_of(tables: Mapping[str, Any], name: str) -> str | None:
    """The key for a table: its whole name, or the part of it after a slash; None without one."""
    keys = [key for key in tables if name == key or name.endswith(f"/{key}")]
    if len(keys) > 1:
        raise ValueError(
            f"A table must have one optimizer. Received: {sorted(keys)} for table '{name}'"
        )
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
