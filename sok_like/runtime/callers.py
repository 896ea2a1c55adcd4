"""Which functions the present call was made from."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping


def within(functions: Mapping[str, Collection[str]]) -> bool:
    """Whether one of some functions is further up the stack: their names, by name of the module."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in functions.get(frame.f_globals.get("__name__", ""), ()):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
