"""Keras callbacks for `fit` on several ranks, for interrupted training, and for TensorBoard."""

from sok_like.callbacks.backup_and_restore import BackupAndRestore as BackupAndRestore
from sok_like.callbacks.over_ranks import BroadcastVariables as BroadcastVariables
from sok_like.callbacks.over_ranks import GlobalMetrics as GlobalMetrics
from sok_like.callbacks.over_ranks import MetricAverage as MetricAverage
from sok_like.callbacks.serve_while_training import ServeWhileTraining as ServeWhileTraining
from sok_like.callbacks.table_metrics import TableMetrics as TableMetrics

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
