"""`sok.deeprec.CollectiveStrategy`: DeepRec's scopes for training with `tf.compat.v1` on ranks.

strategy = CollectiveStrategy()          `install()`, and Horovod
with strategy.scope():                   optimizers average, sessions start alike
    with strategy.embedding_scope():     nothing more: every table is spread over the ranks
        rows = tf.nn.group_embedding_lookup_sparse(...)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf

from sok_like.deeprec import names
from sok_like.group_embedding.strategy import enable_distributed_strategy
from sok_like.lookup import replicas
from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.wrapper import OptimizerWrapper
from sok_like.runtime import comm, gradient_scale
from sok_like.table.variable import is_embedding_variable

ENGINES = ("sok", "hb")


class CollectiveStrategy:
    """Training on the ranks of the job, as DeepRec's class of this name has it.

    It calls `sok.deeprec.install()` and `sok.enable_distributed_strategy("collective")`. The
    variable `COLLECTIVE_STRATEGY` of the environment, "sok" or "hb", chooses an engine in DeepRec;
    here both are the same. Unlike there, `scope` leaves the learning rate as it is given.

    Raises:
        ValueError: `COLLECTIVE_STRATEGY` has another value.
    """

    def __init__(self) -> None:
        engine = os.environ.get("COLLECTIVE_STRATEGY", "sok")
        if engine not in ENGINES:
            raise ValueError(
                f"COLLECTIVE_STRATEGY must be one of {ENGINES}. "
                f"Received: COLLECTIVE_STRATEGY={engine!r}"
            )
        names.install()
        enable_distributed_strategy("collective")

    @contextlib.contextmanager
    def scope(self, *args: Any, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """Within it `tf.compat.v1.train` knows the ranks.

        Each optimizer's `apply_gradients` averages the gradients of ordinary variables over ranks,
        with and without tables. A loss is taken for the mean over the rank's own batch:
        `gradient_scale="auto"` is "mean". `MonitoredTrainingSession` gives all ranks the ordinary
        variables of rank 0 before the first step; without a `config` it places ops softly.

        Args:
            *args, **kwargs: For DeepRec's sake; without effect.
        """
        train = tf.compat.v1.train
        optimizer = train.Optimizer.apply_gradients
        session = train.MonitoredTrainingSession
        train.Optimizer.apply_gradients = _averaging(optimizer)
        train.MonitoredTrainingSession = _starting_alike(session)
        try:
            with gradient_scale.losses_are_means():
                yield self
        finally:
            train.Optimizer.apply_gradients = optimizer
            train.MonitoredTrainingSession = session

    @contextlib.contextmanager
    def embedding_scope(self, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """Where DeepRec's tables must be made. Here tables are spread over ranks everywhere.

        Args:
            **kwargs: For DeepRec's sake; without effect.
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
        """Raises NotImplementedError, and names what exports."""
        raise NotImplementedError(
            "A graph of tf.compat.v1 is not exported in this version. Make the model a tf.Module "
            "or a Keras model, restore its tables by sok.Saver, and call "
            "sok.export_saved_model(model, path)."
        )


def _averaging(stock):
    @functools.wraps(stock)
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        # Such a class has come here with what it has averaged.
        if comm.current().world_size == 1 or knows_tables(self):
            return stock(self, grads_and_vars, *args, **kwargs)
        return OptimizerWrapper(self).apply_gradients(list(grads_and_vars), *args, **kwargs)

    return apply_gradients


def _starting_alike(stock):
    @functools.wraps(stock)
    def monitored_training_session(*args, **kwargs):
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        given["hooks"] = [*(given.get("hooks") or []), _Broadcast()]
        if given.get("config") is None:  # scripts name "/gpu:0", which a machine may not have
            given["config"] = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        return stock(**given)

    return monitored_training_session


class _Broadcast(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks rank 0's ordinary variables, once a session is made or made anew."""

    def begin(self) -> None:
        ordinary = [v for v in tf.compat.v1.global_variables() if not is_embedding_variable(v)]
        self._assign = replicas.broadcast(ordinary, 0, "collective_strategy")

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._assign)
