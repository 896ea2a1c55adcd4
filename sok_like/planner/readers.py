"""Along which axes a table may be cut, by what its regularizer and its constraint read together.

    L1, L2, L1L2; NonNeg             one element                rows and columns
    MaxNorm, MinMaxNorm, UnitNorm    a line along their `axis`  the other axis
    all others, also functions       everything                 neither

Only Keras' own classes are known: a subclass may compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADDITIVE = ("L1", "L2", "L1L2")  # regularizers: sums over elements
_BY_ELEMENT = (*ADDITIVE, "NonNeg")
_BY_LINE = ("MaxNorm", "MinMaxNorm", "UnitNorm")
_KNOWN = (*_BY_ELEMENT, *_BY_LINE)
_KERASES = ("keras", "tf_keras")

ARGUMENTS = ("embeddings_regularizer", "embeddings_constraint")
ROWS, COLUMNS = 0, 1  # axes of a table


def stock_name(reader: Any) -> str | None:
    """The name of a class of Keras, of a regularizer or constraint; None for any other.

    Args:
        reader: The object, its name, or its configuration.
    """
    if isinstance(reader, str):
        plain = reader.replace("_", "").lower()
        return next((name for name in _KNOWN if name.lower() == plain), None)
    if isinstance(reader, Mapping):
        name = reader.get("class_name")
        module = reader.get("module", "keras" if name in _KNOWN else None)  # older files lack it
    else:
        module, name = type(reader).__module__, type(reader).__name__
    return name if str(module).partition(".")[0] in _KERASES else None


def whole_axes(reader: Any) -> set[int]:
    """The axes along which a regularizer or constraint needs a whole table."""
    name = stock_name(reader)
    if reader is None or name in _BY_ELEMENT:
        return set()
    if name not in _BY_LINE:
        return {ROWS, COLUMNS}
    axes = getattr(reader, "axis", 0)
    if isinstance(reader, Mapping):
        axes = reader.get("config", {}).get("axis", 0)
    if axes is None:
        return {ROWS, COLUMNS}
    return {axis % 2 for axis in (axes if isinstance(axes, (list, tuple)) else [axes])}


def check_cut(readers: Mapping[str, Any], axis: int, table_name: str, instead: str) -> None:
    """Raises ValueError if a table that is cut along `axis` must be whole along it.

    Args:
        readers: The table's regularizer and constraint, by the names of these arguments.
        instead: What leaves the table whole.
    """
    for argument, reader in readers.items():
        if axis in whole_axes(reader):
            name = reader.get("class_name") if isinstance(reader, Mapping) else reader
            raise ValueError(
                f"`{argument}` of a table whose {('rows', 'columns')[axis]} are on several ranks "
                f"must not need all of them. To leave the table whole, give {instead}. Received: "
                f"{argument}={name!r} (table '{table_name}')"
            )
