"""Keras callbacks for `fit` on several ranks: `MetricAverage` and `BroadcastVariables`."""

from sok_like.callbacks.broadcast_variables import BroadcastVariables as BroadcastVariables
from sok_like.callbacks.metric_average import MetricAverage as MetricAverage

__all__ = ["BroadcastVariables", "MetricAverage"]
