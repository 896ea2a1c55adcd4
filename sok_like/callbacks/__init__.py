"""Keras callbacks for `fit` on several ranks, and for training that is interrupted."""

from sok_like.callbacks.backup_and_restore import BackupAndRestore as BackupAndRestore
from sok_like.callbacks.broadcast_variables import BroadcastVariables as BroadcastVariables
from sok_like.callbacks.metric_average import MetricAverage as MetricAverage

__all__ = ["BackupAndRestore", "BroadcastVariables", "MetricAverage"]
