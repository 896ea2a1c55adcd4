"""Packages whose names are loaded when first used, so that importing them loads no TensorFlow."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def by_name(modules: Mapping[str, str]) -> dict[str, str]:
    """The module of each name: the inverse of `modules` of the function `names`."""
    return {name: module for module, listed in modules.items() for name in listed.split()}


def names(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        modules: Maps a module to its public names, separated by spaces. A module that begins
            with a dot belongs to the package.
    """
    public = by_name(modules)
    loaded = sys.modules[package].__dict__

    def load(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded[name] = getattr(importlib.import_module(public[name], package), name)
        return loaded[name]

    return sorted(public), load, lambda: sorted(public)
