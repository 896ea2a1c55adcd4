"""What `dir` shows of a table: names for users, of more than a hundred that a tf.Variable has.

docs/reference/tables.md describes the same names.
"""

from __future__ import annotations

from tensorflow.python.ops import resource_variable_ops


class _ShowsNames(type(resource_variable_ops.BaseResourceVariable)):  # type: ignore[misc]
    def __dir__(cls):
        shown = {name for base in cls.__mro__ for name in vars(base).get("_shown_names", ())}
        return sorted(shown | set(dir(object)))


class ShownNames(metaclass=_ShowsNames):
    """Makes `dir` of a class and its objects show `_shown_names`, also those of base classes."""

    _shown_names: tuple[str, ...] = ()

    def __dir__(self):
        return dir(type(self))
