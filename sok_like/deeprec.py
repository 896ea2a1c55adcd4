"""`sok.deeprec.install()`: DeepRec's names, where DeepRec's scripts look for them.

    import sok_like as sok
    import tensorflow.compat.v1 as tf

    sok.deeprec.install()
    tf.config.experimental.enable_distributed_strategy(strategy="collective")

Nothing of TensorFlow is touched unless this is called, and `uninstall()` takes it all back.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.group_embedding.lookup_sparse import (
    group_embedding_lookup,
    group_embedding_lookup_sparse,
)
from sok_like.group_embedding.strategy import enable_distributed_strategy

__all__ = ["install", "uninstall"]


def _places() -> list[tuple[Any, str, Any]]:
    """Module of TensorFlow, name in it, and what is put there."""
    names = [
        ("nn", "group_embedding_lookup", group_embedding_lookup),
        ("nn", "group_embedding_lookup_sparse", group_embedding_lookup_sparse),
        ("config.experimental", "enable_distributed_strategy", enable_distributed_strategy),
    ]
    places = []
    for root in (tf, tf.compat.v1):  # two trees of modules, with nothing shared
        for path, name, value in names:
            module = root
            for part in path.split("."):
                module = getattr(module, part)
            places.append((module, name, value))
    return places


def install() -> None:
    """Puts DeepRec's names into `tf` and `tf.compat.v1`; again does nothing.

    `nn.group_embedding_lookup_sparse`, `nn.group_embedding_lookup` and
    `config.experimental.enable_distributed_strategy`, as this package has them.

    Raises:
        RuntimeError: something else has one of the names. Then none is put anywhere.
    """
    places = _places()
    for module, name, value in places:
        if getattr(module, name, value) is not value:
            raise RuntimeError(
                f"sok.deeprec.install() must find no '{name}' in {module.__name__}. "
                f"Received: {getattr(module, name)!r}"
            )
    for module, name, value in places:
        setattr(module, name, value)


def uninstall() -> None:
    """Takes away what `install` put there; other things of the same name stay."""
    for module, name, value in _places():
        if getattr(module, name, None) is value:
            delattr(module, name)
