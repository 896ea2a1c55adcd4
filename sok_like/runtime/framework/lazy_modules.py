"""Modules that load, and TensorFlow with them, when a name of theirs is first used.

A program uses a name of a package (`names`), or Keras a class that a file asks for (`announce`).

Keras makes an object from a file only if its class is registered. A class registers itself when its
module is imported. So the registry of each Keras first gets stand-ins that import the class. If a
Keras is not imported yet, an import hook waits for the registry's module. The hook compares module
names only, and removes itself when it is done.
"""

import ast
import dataclasses
import importlib
import importlib.abc
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Of Keras 3 and of tf_keras.
REGISTRIES = ("keras.src.saving.object_registration", "tf_keras.src.saving.object_registration")


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


@dataclasses.dataclass
class _StandIn:
    """Has the one method of a class that Keras needs to make an object."""

    load: Callable[[], Any]

    def from_config(self, config: dict, **kwargs: Any) -> Any:
        """Imports the class, which registers itself; makes an object."""
        return self.load().from_config(config, **kwargs)


def announce(classes: Mapping[str, Callable[[], Any]]) -> None:
    """Registers stand-ins for classes, by registered name ("package>Class"), with both Kerases."""
    for registry in REGISTRIES:
        if registry in sys.modules:
            _register(sys.modules[registry], classes)
        else:
            sys.meta_path.insert(0, _Hook(registry, classes))


def _register(registry, classes):
    registered = registry.get_custom_objects()
    for name, load in classes.items():
        registered.setdefault(name, _StandIn(load))


class _Hook(importlib.abc.MetaPathFinder):
    """Leaves it to others to find a registry's module, and registers once it has run."""

    def __init__(self, registry, classes):
        self._registry, self._classes = registry, classes

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._registry:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run, classes = spec.loader.exec_module, self._classes

        def run_and_register(module):
            run(module)
            _register(module, classes)

        spec.loader.exec_module = run_and_register
        return spec
