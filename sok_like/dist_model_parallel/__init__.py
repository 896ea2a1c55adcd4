"""Keras embeddings sharded over ranks, under the names of DMP.

    import sok_like.dist_model_parallel as dmp

Importing this loads no TensorFlow: a name is loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sok_like.dist_model_parallel.broadcast import (
        BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    )
    from sok_like.dist_model_parallel.broadcast import (
        broadcast_variables as broadcast_variables,
    )
    from sok_like.dist_model_parallel.concat_initializer import (
        ConcatInitializer as ConcatInitializer,
    )
    from sok_like.dist_model_parallel.concat_one_hot import (
        ConcatOneHotEmbedding as ConcatOneHotEmbedding,
    )
    from sok_like.dist_model_parallel.embedding import Embedding as Embedding
    from sok_like.dist_model_parallel.gradients import (
        DistributedGradientTape as DistributedGradientTape,
    )
    from sok_like.dist_model_parallel.gradients import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from sok_like.dist_model_parallel.layer import DistributedEmbedding as DistributedEmbedding
    from sok_like.lookup.local_variables import is_local as is_local
    from sok_like.planner import DistEmbeddingStrategy as DistEmbeddingStrategy

# Public name: where it lives.
_PUBLIC = {
    "BroadcastGlobalVariablesCallback": "sok_like.dist_model_parallel.broadcast",
    "ConcatOneHotEmbedding": "sok_like.dist_model_parallel.concat_one_hot",
    "ConcatInitializer": "sok_like.dist_model_parallel.concat_initializer",
    "DistEmbeddingStrategy": "sok_like.planner",
    "DistributedEmbedding": "sok_like.dist_model_parallel.layer",
    "DistributedGradientTape": "sok_like.dist_model_parallel.gradients",
    "DistributedOptimizer": "sok_like.dist_model_parallel.gradients",
    "Embedding": "sok_like.dist_model_parallel.embedding",
    "broadcast_variables": "sok_like.dist_model_parallel.broadcast",
    "is_local": "sok_like.lookup.local_variables",
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
