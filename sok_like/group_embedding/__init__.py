"""DeepRec's GroupEmbedding: many tables looked up in one fused call."""
