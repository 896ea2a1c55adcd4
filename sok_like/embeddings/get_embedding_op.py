"""`sok_like.embeddings.get_embedding_op.get_embedding`, SOK's path of `sok.get_embedding`."""

from sok_like.embeddings.get_embedding import get_embedding as get_embedding

__all__ = ["get_embedding"]
