"""Restores several tables in one call: every table takes its new content, or none does.

    with together():                     a call that reads several tables
        restored(table, content, ...)    content made aside; the table is unchanged
    ...                                  at the end all of them take it, which cannot fail

Until then the old and the new content of all these tables are in memory. If tables are empty, as at
the start of a program, that is the new content alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.attributes import attributes
from sok_like.runtime.steps import text_of


class _Aside(NamedTuple):
    table: Any
    content: Any  # the result of `read_aside`
    then: Callable[[], None] | None


class _Calls(threading.local):
    """The call of a thread whose restores wait: none, or one."""

    waiting: dict[int, _Aside] | None = None


_calls = _Calls()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A scope in which eager restores wait for its end; an exception discards them.

    The end is not a collective: callers on several ranks agree first that all of them reached it.
    A scope within another joins the outer one. In a graph it has no effect.
    """
    if _calls.waiting is not None or not tf.executing_eagerly():
        yield
        return
    waiting: dict[int, _Aside] = {}
    with attributes(_calls, {"waiting": waiting}):
        yield
    for aside in waiting.values():
        aside.table.take_aside(aside.content)
        if aside.then is not None:
            aside.then()


def expected() -> bool:
    """Whether a restore by this thread now is one of several."""
    return _calls.waiting is not None and tf.executing_eagerly()


def restored(table: Any, content: Any, then: Callable[[], None] | None = None) -> None:
    """Lets `table` take the content at the end of the call; of two, the later.

    Args:
        table: EmbeddingVariable.
        content: The result of its `read_aside`, which reported no problem.
        then: Called afterwards.
    """
    assert _calls.waiting is not None
    _calls.waiting[id(table)] = _Aside(table, content, then)


def restore_snapshot(table: Any, **content: Any) -> Any:
    """`table.load_snapshot(**content)`, together with the other tables of the call.

    Raises:
        tf.errors.ResourceExhaustedError: the table may not hold so many keys, or memory is short.
        tf.errors.InvalidArgumentError: the content does not fit. Neither error changes the table.
    """
    if not expected():
        return table.load_snapshot(**content)
    aside, problem = table.read_aside(**content)
    code, _, text = text_of(problem).decode().partition(": ")
    if code == "RESOURCE_EXHAUSTED":
        raise tf.errors.ResourceExhaustedError(None, None, text)
    if code:
        raise tf.errors.InvalidArgumentError(None, None, text)
    return restored(table, aside)
