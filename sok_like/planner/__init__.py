"""Decides which rank owns which rows and columns of the embedding tables.

It uses the standard library only: one process without TensorFlow can make, print and test a plan
for any number of ranks. The packages above carry the plan out.
"""

from sok_like.planner.placement import STRATEGIES
from sok_like.planner.strategy import DistEmbeddingStrategy
from sok_like.planner.tables import Plan, Shard, TableConfig

__all__ = ["STRATEGIES", "DistEmbeddingStrategy", "Plan", "Shard", "TableConfig"]
