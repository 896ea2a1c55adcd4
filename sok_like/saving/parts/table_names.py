"""Which table of a file is read into which table of a layer: that of the same name within it.

    layer    table          name within it    key in files
    feat     feat/user      user              =user    sok.GroupEmbedding and its like
    one      one_a          a                 =a       a table of a user's own
    items    items          none              0        the only table of a layer, called as it is
    one      embedding_3    none              1        the second of a layer, without a name

Keras numbers layers anew, so the layer's own name is no part of it. Tables without a name, and all
of a file without names, are matched by order if there are as many.

Two scopes let a program read what has changed since: `sok.renamed_tables` gives the tables of files
other names, `sok.resized_tables` says what becomes of rows of another width.
"""

import contextlib
import dataclasses
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from sok_like.runtime.checks import unmet, wrong_argument
from sok_like.runtime.framework.scoped_attributes import attributes

# As `sok.EmbeddingVariable` and Keras number them.
_UNNAMED = re.compile(r"(hash_)?embedding(_\d+)?")
_WIDTH_CHOICES = ("pad", "cut", "anew")
_state = threading.local()

PARTIAL = "{problem}. The tables that the file lacks stay as they are; a new one is empty"


def within(layer: str, tables: Sequence[str]) -> list[str]:
    """The names of a layer's tables within it; "" for none."""
    names = [re.sub(rf"^{re.escape(layer)}([/_.-]|$)", "", name) for name in tables]
    names = ["" if _UNNAMED.fullmatch(name) else name for name in names]
    return [name if names.count(name) == 1 else "" for name in names]


def key_of(name: str, number: int) -> str:
    """The key in files of a table with this name; without one, with this number in its layer."""
    return f"={quote(name, safe='').replace('.', '%2E')}" if name else str(number)


def name_of(key: str) -> str:
    """The name of a table with this key, empty for none."""
    return unquote(key[1:]) if key.startswith("=") else ""


def order(key: str) -> tuple[int, str]:
    """Sorts keys by their numbers."""
    return len(key), key


def matched(
    layer: str, expected: Sequence[str], received: Sequence[str], file: str
) -> tuple[list[tuple[int, int]], str]:
    """Positions of tables that layer and file both have, by name; and what one lacks, or ""."""
    names = renamed(layer, received)
    by_order = [i for i, name in enumerate(expected) if not name or not any(names)]
    unnamed = [i for i, name in enumerate(names) if not name]
    pairs = list(zip(by_order, unnamed, strict=True)) if len(by_order) == len(unnamed) else []
    if len(pairs) > 1 and any(expected) and not any(names):
        warnings.warn(
            f"The file has no names of tables. The tables of layer '{layer}' are read in their "
            f"order, as {list(expected)}: they must have been written in the same order",
            stacklevel=3,
        )
    pairs += [(i, names.index(name)) for i, name in enumerate(expected) if name and name in names]
    if len(pairs) == len(expected) == len(names):
        return sorted(pairs), ""
    of_layer, of_file = ([name or "(unnamed)" for name in each] for each in (expected, names))
    problem = (
        f"{file} must hold the tables {of_layer} of layer '{layer}'. Received: {of_file}; "
        "sok.renamed_tables gives tables of a file other names"
    )
    return sorted(pairs), problem


@contextlib.contextmanager
def _chosen(kind: str, choices: Mapping[str, str], required: str, received: str) -> Iterator[None]:
    """A scope of choices by name, which raises at its end unless each was used."""
    unused = set(choices)
    with attributes(_state, {kind: dict(choices), f"unused_{kind}": unused}):
        yield
    if unused:
        text = f"must hold names of tables {required}. Received: {sorted(unused)}, {received}"
        raise ValueError(f"`{kind}` {text}")


@contextlib.contextmanager
def renamed_tables(names: Mapping[str, str]) -> Iterator[None]:
    """A scope in which files are read as if their tables had other names.

    It applies to Keras' files, `tf.train.Checkpoint` and `sok.Saver`. A
    `tf.compat.v1.train.Saver` raises: it takes a dictionary as `var_list`, as for other variables.

    Args:
        names: From names in the file to names in the program: of tables within their layer, or
            whole names. Two tables may change places.

    Raises:
        TypeError: `names` is not a mapping of strings.
        ValueError: two tables of a file get one name; or, at the end of the scope, no file has held
            a table of one of the names.
    """
    texts = [*names, *names.values()] if isinstance(names, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        required = "a dictionary from names in the file to names in the program"
        raise wrong_argument("names", required, names, error=TypeError)
    required, received = "in the files that are read in the scope", "which no file has held"
    with _chosen("names", names, required, received):
        yield


def renames() -> dict[str, str]:
    """The names of the scope."""
    return vars(_state).get("names", {})


def renamed(layer: str, received: Sequence[str]) -> list[str]:
    """The names within a layer that a file's tables have in this program."""
    names = list(received)
    for old, new in renames().items():
        (old_within, new_within) = (within(layer, [name])[0] for name in (old, new))
        for place, name in enumerate(received):
            if name and name in (old, old_within):
                names[place] = new_within
                _state.unused_names.discard(old)
    given = [name for name in names if name]
    if len(set(given)) < len(given):
        required = "have names of their own after sok.renamed_tables"
        raise unmet(f"Tables of layer '{layer}'", required, f"{received}, which became {names}")
    return names


def name_in_files(table: str) -> str:
    """The name in files of a table with this whole name."""
    for old, new in renames().items():
        if new == table:
            _state.unused_names.discard(old)
            return old
    return table


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
    texts = list(choices.values()) if isinstance(choices, Mapping) else []
    if not texts or not all(text in _WIDTH_CHOICES for text in texts):
        required = f"a dictionary from names of tables to one of {_WIDTH_CHOICES}"
        raise wrong_argument("choices", required, choices)
    required = "that the scope reads from rows of another width"
    with _chosen("choices", choices, required, "of which no file had such rows"):
        yield


def width_choice(table: Any, width: int, where: str) -> str:
    """What becomes of rows of a width in a file; "" if the table has the same."""
    if width == table.dim:
        return ""
    own, choices = f"/{table.table_name}", vars(_state).get("choices", {})
    names = [name for name in choices if own.endswith(f"/{name}")]
    text = (
        f"Table '{table.table_name}' has rows of {table.dim} floats. Received: {where} with rows "
        f"of {width}"
    )
    if not names:
        raise ValueError(f"{text}; sok.resized_tables pads them, cuts them or begins anew")
    chosen = _state.choices[names[0]]
    _state.unused_choices.discard(names[0])
    if chosen != "anew" and (chosen == "pad") != (width < table.dim):
        raise ValueError(f"{text}, and sok.resized_tables with '{chosen}'")
    return chosen


def fit(content: Any, width: int) -> Any:
    """The content with rows of a width, without an optimizer's state."""
    rows = np.asarray(content.rows)[:, :width]
    padded = np.pad(rows, [(0, 0), (0, width - rows.shape[1])])
    nothing = {"slot_rows": padded[:, :0], "slot_names": [], "slot_widths": []}
    return dataclasses.replace(content, rows=padded, **nothing, optimizer_step=0)
