"""Tables: this rank's shard as an EmbeddingVariable, its options and policies.

May import `runtime`. The lookup and the front doors stand above it.
"""
