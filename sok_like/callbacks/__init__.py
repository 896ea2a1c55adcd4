"""Keras callbacks for `fit` on several ranks, for interrupted training, and for TensorBoard."""

from sok_like.callbacks.backup_and_restore import BackupAndRestore
from sok_like.callbacks.over_ranks import BroadcastVariables, GlobalMetrics, MetricAverage
from sok_like.callbacks.serve_while_training import ServeWhileTraining
from sok_like.callbacks.table_metrics import TableMetrics

__all__ = [
    "BackupAndRestore",
    "BroadcastVariables",
    "GlobalMetrics",
    "MetricAverage",
    "ServeWhileTraining",
    "TableMetrics",
]


def __dir__() -> list[str]:
    return __all__
