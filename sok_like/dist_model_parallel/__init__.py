"""Ordinary Keras embeddings spread over ranks, under the names of DMP.

    import sok_like.dist_model_parallel as dmp

Importing this loads no TensorFlow: a name is loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sok_like.dist_model_parallel.concat_initializer import (
        ConcatInitializer as ConcatInitializer,
    )
    from sok_like.planner import DistEmbeddingStrategy as DistEmbeddingStrategy

# Public name: where it lives.
_PUBLIC = {
    "ConcatInitializer": "sok_like.dist_model_parallel.concat_initializer",
    "DistEmbeddingStrategy": "sok_like.planner",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sok_like.dist_model_parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
