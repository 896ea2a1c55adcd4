"""Restores of several tables by one call: every table takes its new content, or none does.

    with together():                     a call that reads several tables
        restored(table, content, ...)    made aside; the table keeps what it has
    ...                                  here all of them take theirs, which does not fail

Until then the old and the new content of all tables of the call are in memory. The new one alone
counts where tables are empty, as they are when a program starts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.steps import text_of


class _Aside(NamedTuple):
    table: Any
    content: Any  # what `read_aside` has returned
    then: Callable[[], None] | None


class _Calls(threading.local):
    """The call of a thread, whose restores wait: none, or one."""

    waiting: dict[int, _Aside] | None = None


_calls = _Calls()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within it, eager restores wait for its end; an exception discards them.

    The end is not a collective: its callers on several ranks agree that all of them came here.
    A call within another belongs to that one. In a graph it does nothing.
    """
    if _calls.waiting is not None or not tf.executing_eagerly():
        yield
        return
    waiting: dict[int, _Aside] = {}
    _calls.waiting = waiting
    try:
        yield
    finally:
        _calls.waiting = None
    for aside in waiting.values():
        aside.table.take_aside(aside.content)
        if aside.then is not None:
            aside.then()


def expected() -> bool:
    """Whether a restore that this thread makes now is one of several."""
    return _calls.waiting is not None and tf.executing_eagerly()


def restored(table: Any, content: Any, then: Callable[[], None] | None = None) -> None:
    """Has `table` take the content aside at the end of the call; of two, the later.

    Args:
        table: EmbeddingVariable.
        content: What its `read_aside` has returned, without a problem.
        then: Called when it has.
    """
    assert _calls.waiting is not None
    _calls.waiting[id(table)] = _Aside(table, content, then)


def restore_snapshot(table: Any, **content: Any) -> Any:
    """`table.load_snapshot(**content)`, with the other tables of the call.

    Raises:
        tf.errors.ResourceExhaustedError: the table has no room for so many keys, or no memory.
        tf.errors.InvalidArgumentError: the content does not fit. After both nothing has changed.
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
