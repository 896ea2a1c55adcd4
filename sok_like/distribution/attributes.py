"""Replaces attributes of Keras' classes while a distribution is set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def attributes(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A scope in which attributes of a class or module are replaced."""
    before = {name: vars(owner).get(name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:  # it was inherited or did not exist
                delattr(owner, name)
            else:
                setattr(owner, name, value)
