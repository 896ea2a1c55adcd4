"""Finds out from which functions the present call was made."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Mapping


def within(functions: Mapping[str, Collection[str]]) -> bool:
    """Whether one of `functions` is on the call stack. They map a module to names of functions."""
    return frame_of(functions) is not None


def frame_of(functions: Mapping[str, Collection[str]]) -> types.FrameType | None:
    """The frame of the innermost call of one of them; None if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in functions.get(frame.f_globals.get("__name__", ""), ()):
            return frame
        frame = frame.f_back
    return None
