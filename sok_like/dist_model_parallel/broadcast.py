"""Makes replicated variables equal on all ranks; variables local to a rank are unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.runtime.checks import require
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized


def broadcast_variables(model_vars: Iterable[Any], root_rank: int = 0) -> None:
    """Copies the values of variables from one rank to all ranks.

    Args:
        model_vars: Variables of TensorFlow or Keras, in the same order on all ranks. Variables that
            are local to a rank (`de_local`) are skipped, and so are their slot variables in a
            `DistributedOptimizer`.
        root_rank: The rank whose values are copied.

    Raises:
        ValueError: `root_rank` does not exist.
    """
    with tf.init_scope():
        ensure_initialized()
    ranks = comm.current().world_size
    require(0 <= root_rank < ranks, "root_rank", f"in [0, {ranks})", root_rank)
    replicas.broadcast(model_vars, root_rank, "dmp_broadcast")


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """A callback that makes replicated variables equal after the first batch of `fit`.

    It also copies the optimizer's variables, so the optimizer must be a `DistributedOptimizer`,
    which marks those of local variables.

    Args:
        root_rank: The rank whose values are copied.
        device: Ignored.

    Raises:
        ValueError: `root_rank` does not exist; raised after the first batch.
    """

    def __init__(self, root_rank: int = 0, device: str = ""):
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False

    def on_train_batch_end(self, batch, logs=None):
        # Not earlier: only now do all variables exist.
        if self.broadcast_done:
            return
        variables = replicas.with_optimizer(self.model.variables, self.model.optimizer)
        broadcast_variables(variables, self.root_rank)
        self.broadcast_done = True
