# The public names; `runtime/framework/lazy_modules.py` reads them from here.
from sok_like.dist_model_parallel.embedding import ConcatOneHotEmbedding as ConcatOneHotEmbedding
from sok_like.dist_model_parallel.embedding import Embedding as Embedding
from sok_like.dist_model_parallel.layer import DistributedEmbedding as DistributedEmbedding
from sok_like.dist_model_parallel.local_layers import ConcatInitializer as ConcatInitializer
from sok_like.dist_model_parallel.training import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from sok_like.dist_model_parallel.training import DistributedGradientTape as DistributedGradientTape
from sok_like.dist_model_parallel.training import DistributedOptimizer as DistributedOptimizer
from sok_like.dist_model_parallel.training import broadcast_variables as broadcast_variables
from sok_like.lookup.local_variables import is_local as is_local
from sok_like.planner import DistEmbeddingStrategy as DistEmbeddingStrategy

__all__: list[str]
