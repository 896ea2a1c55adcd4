"""`sok.get_embedding`: layers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_layers: dict[str, Any] = {}


def get_embedding(name: str, constructor: Callable | None = None, **kwargs: Any) -> Any:
    """The layer called `name`, made at the first call and returned by later ones.

    Args:
        name: The layer's name.
        constructor: `sok.DistributedEmbedding` or `sok.All2AllDenseEmbedding`; needed at the first
            call.
        **kwargs: Its arguments; ignored by later calls.

    Raises:
        ValueError: no layer has the name and no constructor is given.
    """
    if name not in _layers:
        if constructor is None:
            raise ValueError(
                f"`constructor` must be given for a new name. Received: name={name!r}; known "
                f"names: {sorted(_layers)}"
            )
        _layers[name] = constructor(name=name, **kwargs)
    return _layers[name]
