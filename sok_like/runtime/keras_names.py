"""Names of this package's classes in Keras' files, known to Keras 3 before the classes are loaded.

Keras 3 makes an object of a file only if its class was registered, and a class registers itself
when its module is imported, which imports TensorFlow. So Keras' registry first gets stand-ins that
import the class when a file asks for it. Where Keras is not imported yet, an import hook waits for
the registry's module; it looks at names of modules only, and goes when it has done its work.
(tf_keras imports a class of a file by the name of its module, and needs none of this.)
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

_REGISTRY = "keras.src.saving.object_registration"


class _StandIn:
    """What Keras asks of a class that it makes an object of."""

    def __init__(self, load: Callable[[], Any]):
        self._load = load

    def from_config(self, config: dict, **kwargs: Any) -> Any:
        """An object of the class, which registers itself now."""
        return self._load().from_config(config, **kwargs)


def announce(classes: Mapping[str, Callable[[], Any]]) -> None:
    """Registers stand-ins with Keras 3, now or when Keras is imported.

    Args:
        classes: Registered name ("package>Class") to a function that imports the class.
    """
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY], classes)
    else:
        sys.meta_path.insert(0, _Hook(classes))


def _register(registry, classes):
    known = registry.get_custom_objects()
    for name, load in classes.items():
        known.setdefault(name, _StandIn(load))


class _Hook(importlib.abc.MetaPathFinder):
    """Finds the registry's module as it would be found without it, and registers once it is run."""

    def __init__(self, classes):
        self._classes = classes

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _REGISTRY:
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
