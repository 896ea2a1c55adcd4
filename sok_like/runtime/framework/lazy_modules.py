"""Packages whose names are loaded when first used, so that importing them loads no TensorFlow."""

import ast
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any


def names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, with what its `__init__.pyi` imports."""
    loaded = sys.modules[package].__dict__
    stub = ast.parse(pathlib.Path(loaded["__file__"]).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    public = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if public[name] == package:
            loaded[name] = importlib.import_module(f"{package}.{name}")
        else:
            loaded[name] = getattr(importlib.import_module(public[name]), name)
        return loaded[name]

    def listed() -> list[str]:
        return sorted([*public, *(name for name in loaded if name.startswith("__"))])

    return sorted(public), load, listed
