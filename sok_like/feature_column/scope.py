"""`group_embedding_column_scope`: which group an embedding column belongs to.

    with group_embedding_column_scope("user"):
        age = embedding_column(...)         group "user"
        with group_embedding_column_scope("ads"):
            ad = embedding_column(...)      group "ads": the innermost scope counts
    with group_embedding_column_scope("user"):
        city = embedding_column(...)        group "user" again: entering it once more appends

A group is a name on its columns and nothing more: there is no list of members to keep, and a layer
looks up together those columns of a name that it is given.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

_here = threading.local()
_unnamed = itertools.count()


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[str]:
    """Embedding columns that are made within it are looked up together.

    Args:
        name: The group. Entering a name again adds to its group; within another scope the inner
            one counts. None is a new group each time.

    Yields:
        The group's name.

    Raises:
        ValueError: `name` is no string, or empty.
    """
    if name is None:
        name = f"group_embedding_{next(_unnamed)}"
    if not isinstance(name, str) or not name:
        raise ValueError(f"`name` must be None or a string that is not empty. Received: {name!r}")
    stack = _stack()
    stack.append(name)
    try:
        yield name
    finally:
        stack.pop()


def current_group() -> str | None:
    """The innermost scope's group; None outside of all."""
    stack = _stack()
    return stack[-1] if stack else None


def _stack() -> list[str]:
    if not hasattr(_here, "stack"):
        _here.stack = []
    return _here.stack
