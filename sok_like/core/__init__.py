"""Holds `initialize` and `context_scope`, at the paths SOK 1.x published them."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # `sok.core.context_scope` works after `import sok_like as sok`, as it did in SOK.
    if name in ("context_scope", "initialize"):
        return importlib.import_module(f"sok_like.core.{name}")
    raise AttributeError(f"module 'sok_like.core' has no attribute {name!r}")
