"""Holds the module `Saver`, at SOK 1.x's published path."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Saver":  # `sok.saver.Saver` works after `import sok_like as sok`
        return importlib.import_module("sok_like.saver.Saver")
    raise AttributeError(f"module 'sok_like.saver' has no attribute {name!r}")
