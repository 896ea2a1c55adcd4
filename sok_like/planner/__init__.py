"""Decides which rank owns which rows and columns of the embedding tables.

It uses the standard library only: one process without TensorFlow can make, print and test a plan
for any number of ranks. The packages above carry the plan out.
"""

from sok_like.planner.placement import STRATEGIES as STRATEGIES
from sok_like.planner.strategy import DistEmbeddingStrategy as DistEmbeddingStrategy
from sok_like.planner.tables import Plan as Plan
from sok_like.planner.tables import Shard as Shard
from sok_like.planner.tables import TableConfig as TableConfig

__all__ = ["STRATEGIES", "DistEmbeddingStrategy", "Plan", "Shard", "TableConfig"]
