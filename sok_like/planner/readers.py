"""Along which axes a table may be cut, by what its regularizer or constraint reads together.

    L1, L2, L1L2; NonNeg             one element                rows and columns
    MaxNorm, MinMaxNorm, UnitNorm    a line along their `axis`  the other axis
    all others, also functions       everything                 neither

Only Keras' own classes are known: a subclass may read more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADDITIVE = ("L1", "L2", "L1L2")  # regularizers that are sums over elements
ARGUMENTS = ("embeddings_regularizer", "embeddings_constraint")
ROWS, COLUMNS = 0, 1


def stock_name(reader: Any) -> str | None:
    """The class of a regularizer or constraint (object, name or configuration), if Keras has it."""
    if isinstance(reader, str):
        return reader.title().replace("_", "")
    if isinstance(reader, Mapping):
        module, name = reader.get("module", "keras"), reader.get("class_name")
    else:
        module, name = type(reader).__module__, type(reader).__name__
    return name if str(module).partition(".")[0] in ("keras", "tf_keras") else None


def whole_axes(reader: Any) -> set[int]:
    """The axes along which a regularizer or constraint needs a whole table; none for None."""
    name = stock_name(reader)
    if reader is None or name in (*ADDITIVE, "NonNeg"):
        return set()
    config = reader.get("config", {}) if isinstance(reader, Mapping) else {}
    axis = config.get("axis", getattr(reader, "axis", 0))
    if axis is None or name not in ("MaxNorm", "MinMaxNorm", "UnitNorm"):
        return {ROWS, COLUMNS}
    return {each % 2 for each in (axis if isinstance(axis, (list, tuple)) else [axis])}


def check_cut(readers: Mapping[str, Any], axis: int, table_name: str, instead: str) -> None:
    """Raises ValueError if a table that is cut along `axis` must be whole along it.

    `readers` are its regularizer and constraint, by argument; `instead` leaves the table whole.
    """
    for argument, reader in readers.items():
        if axis in whole_axes(reader):
            raise ValueError(
                f"`{argument}` of a table whose {('rows', 'columns')[axis]} are on several ranks "
                f"must not need all of them. To leave the table whole, give {instead}. Received: "
                f"{argument}={stock_name(reader) or reader!r} (table '{table_name}')"
            )
