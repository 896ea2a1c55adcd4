"""`sok.deeprec.CollectiveStrategy`: DeepRec's scopes for training with `tf.compat.v1` on ranks.

strategy = CollectiveStrategy()          `install()`, and the engine
with strategy.scope():                   optimizers average, sessions start with equal variables
    with strategy.embedding_scope():     no effect: every table is spread over the ranks
        rows = tf.nn.group_embedding_lookup_sparse(...)
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf

from sok_like.deeprec import names
from sok_like.group_embedding.variables import enable_distributed_strategy
from sok_like.lookup import replicas
from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime.checks import require
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm, lookup_options
from sok_like.table.variable import is_embedding_variable

ENGINES = ("sok", "hb")


class CollectiveStrategy:
    """Training on the ranks of the job, like DeepRec's class of this name.

    It calls `sok.deeprec.install()` and `sok.enable_distributed_strategy("collective")`. In DeepRec
    the environment variable `COLLECTIVE_STRATEGY`, "sok" or "hb", chooses an engine; here both are
    the same. Unlike DeepRec's, `scope` does not change the learning rate.

    Raises:
        ValueError: `COLLECTIVE_STRATEGY` has another value.
    """

    def __init__(self) -> None:
        engine = os.environ.get("COLLECTIVE_STRATEGY", "sok")
        require(engine in ENGINES, "COLLECTIVE_STRATEGY", f"one of {ENGINES}", engine)
        enable_distributed_strategy("collective")  # may raise, so it comes first
        names.install()

    @contextlib.contextmanager
    def scope(self, *args: Any, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """A scope in which `tf.compat.v1.train` works on ranks.

        Each optimizer's `apply_gradients` averages the gradients of ordinary variables over ranks,
        with and without tables. Losses are treated as means over the rank's own batch:
        `gradient_scale="auto"` is "mean". `MonitoredTrainingSession` gives all ranks rank 0's
        ordinary variables before the first step. Without a `config` it allows soft placement of
        ops.

        Args:
            *args, **kwargs: DeepRec's; ignored.
        """
        train = tf.compat.v1.train
        why = "sok.deeprec.CollectiveStrategy.scope"
        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in (
                (train.Optimizer, "apply_gradients", _averaging),
                (train, "MonitoredTrainingSession", _starting_alike),
            ):
                stack.callback(hooks.wrap(owner, name, wrapper, why, copies=False).undo)
            stack.enter_context(lookup_options.losses_are_means)
            yield self

    @contextlib.contextmanager
    def embedding_scope(self, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """In DeepRec, tables must be made in it. Here tables are spread over ranks everywhere.

        Args:
            **kwargs: DeepRec's; ignored.
        """
        yield self

    def world_size(self) -> int:
        """The number of ranks."""
        return comm.current().world_size

    def rank(self) -> int:
        """This process's rank."""
        return comm.current().rank

    def estimator(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: TensorFlow 2.16 and later have no Estimator."""
        raise NotImplementedError(
            "TensorFlow has no Estimator since 2.16. Train in tf.train.MonitoredTrainingSession, "
            "or with Keras and sok.GroupEmbedding."
        )

    def export_saved_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError, and names the function that exports."""
        raise NotImplementedError(
            "A graph of tf.compat.v1 is not exported in this version. Make the model a tf.Module "
            "or a Keras model, restore its tables by sok.Saver, and call "
            "sok.export_saved_model(model, path)."
        )


def _averaging(own, self, grads_and_vars, *args, **kwargs):
    # A class with tables calls this function with gradients that it has averaged.
    if comm.current().world_size == 1 or knows_tables(self):
        return own(self, grads_and_vars, *args, **kwargs)
    return OptimizerWrapper(self).apply_gradients(list(grads_and_vars), *args, **kwargs)


def _starting_alike(own, *args, **kwargs):
    arguments = inspect.signature(own).bind(*args, **kwargs).arguments
    arguments["hooks"] = [*(arguments.get("hooks") or []), _Broadcast()]
    if arguments.get("config") is None:  # scripts name "/gpu:0", which a machine may lack
        arguments["config"] = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    return own(**arguments)


class _Broadcast(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks rank 0's ordinary variables whenever a session is created."""

    def begin(self) -> None:
        ordinary = [v for v in tf.compat.v1.global_variables() if not is_embedding_variable(v)]
        self._assign = replicas.broadcast(ordinary, 0, "collective_strategy")

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._assign)
