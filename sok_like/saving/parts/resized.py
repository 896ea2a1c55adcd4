"""Rows of another width than the table's: what `sok.resized_tables` has chosen for them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework.scoped_attributes import attributes

CHOICES = ("pad", "cut", "anew")
_state = threading.local()


@contextlib.contextmanager
def resized_tables(choices: Mapping[str, str]) -> Iterator[None]:
    """A scope in which files may be read into tables whose rows have another width.

    It applies to Keras' files, `tf.train.Checkpoint`, `sok.Saver` and v1 savers. Without it such a
    load raises. Frequencies and steps of policies go with the rows. The optimizer's state does not:
    it starts anew at the next step.

    Args:
        choices: By name of a table of this program, within its layer or whole: "pad", zeros behind
            each row of the file; "cut", the first elements of each row; or "anew", an empty table.

    Raises:
        ValueError: a choice is none of these, or does not fit the widths; or, at the end of the
            scope, no file had rows of another width for one of the names.
    """
    given = dict(choices) if isinstance(choices, Mapping) else {}
    if not given or not all(choice in CHOICES for choice in given.values()):
        required = f"a dictionary from names of tables to one of {CHOICES}"
        raise wrong_argument("choices", required, choices)
    unused = set(given)
    with attributes(_state, {"choices": given, "unused": unused}):
        yield
    if unused:
        raise ValueError(
            "`choices` must hold names of tables that the scope reads from rows of another width. "
            f"Received: {sorted(unused)}, of which no file had such rows"
        )


def choice(table: Any, width: int, where: str) -> str:
    """What becomes of rows of a width in a file; "" if the table has the same."""
    if width == table.dim:
        return ""
    own, choices = f"/{table.table_name}", vars(_state).get("choices", {})
    names = [name for name in choices if own.endswith(f"/{name}")]
    text = f"Table '{table.table_name}' has rows of {table.dim} floats. Received: {where} with rows"
    text = f"{text} of {width}"
    if not names:
        raise ValueError(f"{text}; sok.resized_tables pads them, cuts them or begins anew")
    chosen = _state.choices[names[0]]
    _state.unused.discard(names[0])
    if chosen != "anew" and (chosen == "pad") != (width < table.dim):
        raise ValueError(f"{text}, and sok.resized_tables with '{chosen}'")
    return chosen


def fit(content: Any, width: int) -> Any:
    """The content with rows of a width, without an optimizer's state."""
    rows = np.asarray(content.rows)[:, :width]
    padded = np.pad(rows, [(0, 0), (0, width - rows.shape[1])])
    nothing = {"slot_rows": padded[:, :0], "slot_names": [], "slot_widths": []}
    return dataclasses.replace(content, rows=padded, **nothing, optimizer_step=0)
