"""`sok.callbacks.BroadcastVariables`: the same initial ordinary variables on all ranks."""

from __future__ import annotations

import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.lookup.local_variables import is_local
from sok_like.runtime.checks import as_integer, wrong_argument
from sok_like.runtime.ranks import comm


class BroadcastVariables(tf.keras.callbacks.Callback):
    """Gives all ranks the weights of one rank, once, at the first step of `fit`.

    It does so before the step if the model is built. Otherwise (a subclassed model under tf_keras)
    it does so after the step, and includes the optimizer's variables. Tables, shards of one rank,
    and vocabularies of layers are unchanged.

    Args:
        root_rank: The rank whose values are used.

    Raises:
        ValueError: the rank does not exist, or the models of the ranks differ.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        world_size = comm.current().world_size
        rank = as_integer(root_rank)
        if rank is None or not 0 <= rank < world_size:
            raise wrong_argument("root_rank", f"an integer in [0, {world_size})", root_rank)
        self.root_rank = rank
        self._done = False

    def on_train_batch_begin(self, batch, logs=None):
        if not self._done and self.model.built:
            self._broadcast(self.model.weights)

    def on_train_batch_end(self, batch, logs=None):
        if not self._done:
            self._broadcast(replicas.with_optimizer(self.model.weights, self.model.optimizer))

    def _broadcast(self, variables):
        self._done = True
        variables = [variable for variable in variables if not is_local(variable)]
        if comm.current().world_size > 1:
            replicas.check_same_shapes(variables, "sok_broadcast_shapes")
            replicas.broadcast(variables, self.root_rank, "sok_broadcast")
            for layer in self.model._flatten_layers():
                if isinstance(layer, tf.keras.layers.Normalization):
                    layer.finalize_state()  # it reads constants, made of its variables
