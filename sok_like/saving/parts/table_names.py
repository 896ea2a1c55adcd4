"""Which table of a file belongs to which table of a layer: that of the same name within the layer.

    layer    table          name within it    key in files
    feat     feat/user      user              =user    sok.GroupEmbedding and its like
    one      one_a          a                 =a       a table of a user's own
    items    items          none              0        the only table of a layer, called as it is
    one      embedding_3    none              1        the second of a layer, without a name

Keras numbers layers anew, so the layer's own name is no part of it. Tables without a name are
matched by their order, and only if there are as many in the file. If the file has no names at all,
as earlier versions wrote it, this goes for all tables.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote, unquote

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework.scoped_attributes import attributes

# As `sok.EmbeddingVariable` and Keras number them.
_UNNAMED = re.compile(r"(hash_)?embedding(_\d+)?")
_state = threading.local()

PARTIAL = "{problem}. The tables that the file lacks stay as they are; a new one is empty"


def within(layer: str, tables: Sequence[str], other_number: bool = False) -> list[str]:
    """The names of a layer's tables within it; empty for those that have none, or share one.

    With `other_number` the layer may have had another of Keras' numbers: `layer_2`.
    """
    base = re.escape(layer)
    if other_number:
        base = re.escape(re.sub(r"_\d+$", "", layer)) + r"(_\d+)?"
    found = [re.sub(rf"^{base}([/_.-]|$)", "", name) for name in tables]
    found = ["" if _UNNAMED.fullmatch(name) else name for name in found]
    return [name if found.count(name) == 1 else "" for name in found]


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
    """Matches the names of a layer's tables and of those in a file, within the scope of renames.

    Returns:
        The positions of each table that both have, in the layer and in the file; and what the one
        has that the other lacks, "" for nothing.
    """
    names = renamed(layer, received)
    by_order = [i for i, name in enumerate(expected) if not name or not any(names)]
    unnamed = [i for i, name in enumerate(names) if not name]
    pairs = list(zip(by_order, unnamed, strict=True)) if len(by_order) == len(unnamed) else []
    if len(pairs) > 1 and any(expected) and not any(names):
        warnings.warn(
            "The file has no names of tables; earlier versions stored none. The tables of layer "
            f"'{layer}' are read in their order, as {list(expected)}: they must have been written "
            "in the same order",
            stacklevel=3,
        )
    pairs += [(i, names.index(name)) for i, name in enumerate(expected) if name and name in names]
    if len(pairs) == len(expected) == len(names):
        return sorted(pairs), ""
    mine, there = ([name or "(unnamed)" for name in each] for each in (expected, names))
    problem = (
        f"{file} must hold the tables {mine} of layer '{layer}'. Received: {there}; "
        "sok.renamed_tables gives tables of a file other names"
    )
    return sorted(pairs), problem


# ---- renames ----


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
    unread = set(names)
    with attributes(_state, {"renames": dict(names), "unread": unread}):
        yield
    if unread:
        raise ValueError(
            "`names` must hold names of tables in the files that are read in the scope. "
            f"Received: {sorted(unread)}, which no file has held"
        )


def renames() -> dict[str, str]:
    """The names of the scope."""
    return vars(_state).get("renames", {})


def renamed(layer: str, received: Sequence[str]) -> list[str]:
    """The names within a layer that a file's tables have in this program."""
    found = list(received)
    for old, new in renames().items():
        (old_within, new_within) = (within(layer, [each])[0] for each in (old, new))
        for place, name in enumerate(received):
            if name and name in (old, old_within):
                found[place] = new_within
                _state.unread.discard(old)
    named = [name for name in found if name]
    if len(set(named)) < len(named):
        raise ValueError(
            f"Tables of layer '{layer}' must have names of their own after sok.renamed_tables. "
            f"Received: {received}, which became {found}"
        )
    return found


def name_in_files(table: str) -> str:
    """The name in files of a table with this whole name."""
    for old, new in renames().items():
        if new == table:
            _state.unread.discard(old)
            return old
    return table
