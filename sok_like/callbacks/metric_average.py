"""`sok.callbacks.MetricAverage`: averages metrics over ranks, for callbacks that use them."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed


class MetricAverage(tf.keras.callbacks.Callback):
    """Replaces the metrics of an epoch by their means over ranks, the same bits on every rank.

    `ReduceLROnPlateau`, `EarlyStopping` and `ModelCheckpoint` then decide the same on all ranks. It
    must come before them in the list of callbacks. One collective per epoch. Each rank counts once,
    whatever its number of samples. The mean of an AUC over ranks is not the AUC of all samples.

    Raises:
        ValueError: at the start of training, if a callback that monitors a metric comes before this
            one; at the end of an epoch, if ranks have metrics of different names.
    """

    def on_epoch_end(self, epoch, logs=None):
        communicator = comm.current()
        if communicator.world_size == 1 or logs is None:
            return
        names = sorted(name for name, value in logs.items() if _is_number(value))
        metrics = {name: float(np.asarray(logs[name])) for name in names}
        ranks = agreed(lambda: metrics, communicator, "sok.callbacks.MetricAverage")
        if any(list(of_rank) != names for of_rank in ranks):
            raise ValueError(
                "The metrics of an epoch must be the same on all ranks. "
                f"Received, by rank: {[list(of_rank) for of_rank in ranks]}"
            )
        # Added in rank order, so all ranks get the same bits.
        means = np.mean([list(of_rank.values()) for of_rank in ranks], axis=0)
        logs.update(zip(names, means.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Number):
        return True
    return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)


@hooks.at_init
def _install():
    def begin(own, self, logs=None):
        averages = [i for i, c in enumerate(self.callbacks) if isinstance(c, MetricAverage)]
        for callback in self.callbacks[: max(averages, default=0)]:
            if hasattr(callback, "monitor"):
                raise ValueError(
                    "sok.callbacks.MetricAverage() must come before every callback that monitors a "
                    f"metric. Received: {type(callback).__name__} before it"
                )
        return own(self, logs)

    why = "MetricAverage must come before callbacks that monitor metrics"
    hooks.wrap(tf.keras.callbacks.CallbackList, "on_train_begin", begin, why)
