"""Decisions about where the rows and columns of embedding tables live, and nothing else.

Standard library only: a plan can be made, printed and tested on a machine without TensorFlow, for
any number of ranks, in one process. Whoever carries it out stands above.
"""

from sok_like.planner.placement import STRATEGIES as STRATEGIES
from sok_like.planner.strategy import DistEmbeddingStrategy as DistEmbeddingStrategy
from sok_like.planner.tables import Plan as Plan
from sok_like.planner.tables import Shard as Shard
from sok_like.planner.tables import TableConfig as TableConfig

__all__ = ["STRATEGIES", "DistEmbeddingStrategy", "Plan", "Shard", "TableConfig"]
