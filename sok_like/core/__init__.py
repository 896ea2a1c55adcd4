"""Holds `initialize` and `context_scope`, at SOK 1.x's published paths."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Makes `sok.core.context_scope` work after `import sok_like as sok`, as in SOK.
    if name in ("context_scope", "initialize"):
        return importlib.import_module(f"sok_like.core.{name}")
    raise AttributeError(f"module 'sok_like.core' has no attribute {name!r}")
