"""`TFDistributedEmbedding` at its second path in SOK 1.x; the class is in `embeddings`."""

from sok_like.embeddings.tf_distributed_embedding import (
    TFDistributedEmbedding as TFDistributedEmbedding,
)

__all__ = ["TFDistributedEmbedding"]
