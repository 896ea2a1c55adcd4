"""Attributes that have other values in a scope, or that two objects share."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def attributes(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A scope in which attributes of `owner`, such as a `threading.local`, are replaced."""
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:  # it was inherited or did not exist
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def view(cls: type, owner: Any) -> Any:
    """An instance of `cls` that shares all attributes with `owner`, such as an optimizer."""
    sharing: Any = object.__new__(cls)
    # Bypasses the __setattr__ of Keras' optimizers, which would track the dictionary for saving.
    object.__setattr__(sharing, "__dict__", owner.__dict__)
    return sharing
