"""Optimizers that can train embedding variables, with fused updates of the rows of a batch."""

from sok_like.optimizers.adam import Adam as Adam
from sok_like.optimizers.own import LazyAdam as LazyAdam
from sok_like.optimizers.own import RowWiseAdagrad as RowWiseAdagrad
from sok_like.optimizers.wrapper import OptimizerScope as OptimizerScope
from sok_like.optimizers.wrapper import OptimizerWrapper as OptimizerWrapper

__all__ = ["Adam", "LazyAdam", "OptimizerScope", "OptimizerWrapper", "RowWiseAdagrad"]


def __dir__() -> list[str]:
    return __all__
