"""`group_embedding_column_scope` sets the group of embedding columns.

    with group_embedding_column_scope("user"):
        age = embedding_column(...)         group "user"
        with group_embedding_column_scope("ads"):
            ad = embedding_column(...)      group "ads": the innermost scope counts
    with group_embedding_column_scope("user"):
        city = embedding_column(...)        group "user" again

A group is only a name that its columns store; there is no list of members. A layer looks up those
of its columns together that have the same name.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from sok_like.runtime.checks import require
from sok_like.runtime.framework.scoped_attributes import attributes

_here = threading.local()
_unnamed = itertools.count()


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[str]:
    """A scope whose embedding columns are looked up together.

    Args:
        name: The group. A name that is used again adds to its group. In nested scopes the
            innermost counts. None: a new group each time.

    Yields:
        The group's name.

    Raises:
        ValueError: `name` is not a string, or is empty.
    """
    if name is None:
        name = f"group_embedding_{next(_unnamed)}"
    is_name = isinstance(name, str) and bool(name)
    require(is_name, "name", "None or a non-empty string", name)
    with attributes(_here, {"group": name}):
        yield name


def current_group() -> str | None:
    """The innermost scope's group; None outside of any scope."""
    return getattr(_here, "group", None)
