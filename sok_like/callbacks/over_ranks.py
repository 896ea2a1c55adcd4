"""What ranks have in common in a `fit`: initial variables, and metrics.

    rank 0   states of metrics --.                                 .-- results, logs, callbacks
                                  >-- added in rank order, eagerly --
    rank 1   states of metrics --'                                 '-- the same bits

Keras reads the results of metrics in one function, at the end of an epoch and of an evaluation.
`GlobalMetrics` has the sums in the place of the rank's own states while it does.
"""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.lookup.local_variables import is_local
from sok_like.runtime.checks import as_integer, unmet, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, check_same, send

_CALL = "sok.callbacks.GlobalMetrics"


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
        self.root_rank, self._done = rank, False

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
            replicas.check_same_shapes(variables)
            replicas.broadcast(variables, self.root_rank, "sok_broadcast")
            for layer in self.model._flatten_layers():
                if isinstance(layer, tf.keras.layers.Normalization):
                    layer.finalize_state()  # it reads constants, made of its variables


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
        values = ((name, np.asarray(logs[name])) for name in sorted(logs))
        metrics = {n: float(v) for n, v in values if v.ndim == 0 and v.dtype.kind in "biuf"}
        ranks = agreed(lambda: metrics, communicator, "sok.callbacks.MetricAverage")
        required = "The metrics of an epoch must be the same on all ranks"
        check_same([[*of_rank] for of_rank in ranks], required, ValueError)
        # Added in rank order, so all ranks get the same bits.
        means = np.mean([list(of_rank.values()) for of_rank in ranks], axis=0)
        logs.update(zip(metrics, means.tolist(), strict=True))


class GlobalMetrics(tf.keras.callbacks.Callback):
    """Gives `fit` and `evaluate` the metrics of the samples of all ranks, the same on every rank.

    Keras' metrics keep sums over samples, such as totals, counts and confusion matrices. At the end
    of an epoch and of an evaluation these are added over ranks, by two small collectives, and the
    results computed from them. So an AUC is that of all samples, and ranks may have unequal
    batches. All callbacks, the history and the returned values have these numbers; until the epoch
    ends the progress bar shows the rank's own. Each rank goes on with its own states.

    Every rank needs it, `fit(..., callbacks=[GlobalMetrics()])`, `evaluate` as well. Under a
    distribution that splits batches, metrics are those of all samples without it.

    A metric of a class with a `result` of its own keeps the values of each rank, with one warning,
    unless `sums` names the class. So do values that a `train_step` of your own returns beside
    `self.metrics`. `MetricAverage` averages both.

    Args:
        sums: Classes with a `result` of their own whose states are all sums over samples.

    Raises:
        TypeError: `sums` has an item that is not a class of metrics.
        ValueError: at the end of an epoch or evaluation, if ranks have different metrics.
    """

    def __init__(self, *, sums: Sequence[type] = ()):
        super().__init__()
        comm.current()  # raises before `sok.Init`, which wraps Keras' functions
        for item in sums:
            if not (isinstance(item, type) and issubclass(item, tf.keras.metrics.Metric)):
                raise TypeError(f"`sums` must contain classes of Keras metrics. Received: {item!r}")
        self.sums = tuple(sums)
        self._warned: set[str] = set()

    def _results(self, model: Any, logs: Any, results: Callable[[], Any]) -> Any:
        """What `results()` returns while the states of metrics are sums over ranks."""
        metrics: list[Any] = []
        states: dict[int, tuple[str, Any]] = {}
        for metric in model.metrics:  # Keras 3 has those that were compiled in a container
            inner = getattr(metric, "metrics", None) if _is_keras(type(metric)) else None
            metrics += inner or [metric]
        for metric in metrics:
            cls = type(metric)
            if _is_keras(cls.result) or issubclass(cls, self.sums):
                states.update({id(v): (cls.__name__, v) for v in metric.variables})
            else:
                self._warn(
                    f"metric '{metric.name}' of class {cls.__name__}: its class has a `result` of "
                    f"its own. If its states are sums over samples, pass `sums=[{cls.__name__}]`"
                )
        with _summed(list(states.values()), _ranks_of(model)):
            of_all = results()
            if of_all is not logs:  # a metric may return its variable, whose value changes again
                tensor = tf.convert_to_tensor
                return {n: tensor(v) if hasattr(v, "assign") else v for n, v in of_all.items()}
        if logs:  # Keras takes those of the last step if their names are not those of metrics
            self._warn(
                f"{sorted(logs)}: the step returns other names than those of `model.metrics`"
            )
        return logs

    def _warn(self, what):
        if what not in self._warned and comm.current().rank == 0:
            text = f"{_CALL} cannot add over ranks, and leaves those of each rank: {what}"
            warnings.warn(text, stacklevel=2)
        self._warned.add(what)


def _is_keras(function_or_class):
    return function_or_class.__module__.partition(".")[0] in ("keras", "tf_keras")


def _ranks_of(model):
    """The communicator of the ranks that have different samples."""
    distribution = getattr(model, "_sok_distribution", None)
    if distribution is None:
        return comm.current()
    if distribution.auto_shard_dataset:
        return comm.SingleProcess()
    return distribution.mesh.along(distribution.batch_dim_name)


@contextlib.contextmanager
def _summed(states, communicator) -> Iterator[None]:
    """A scope in which variables, given with their metrics' classes, are their sums over ranks."""
    if communicator.world_size == 1:
        yield
        return
    own = [np.asarray(variable) for _, variable in states]
    kinds = [[cls, s.dtype.name, *s.shape] for (cls, _), s in zip(states, own, strict=True)]
    ranks = agreed(lambda: kinds, communicator, _CALL)
    check_same(ranks, "Metrics must have the same states on all ranks", ValueError)
    block = np.concatenate([np.zeros(0), *(state.ravel().astype(np.float64) for state in own)])
    # Added in rank order, so all ranks get the same bits.
    sums = np.sum(send(block, communicator, True).reshape(len(ranks), -1), axis=0)
    ends = np.cumsum([state.size for state in own])
    try:
        for (_, variable), state, end in zip(states, own, ends, strict=True):
            total = sums[end - state.size : end].reshape(state.shape)
            variable.assign(total.astype(state.dtype))
        yield
    finally:
        for (_, variable), state in zip(states, own, strict=True):
            variable.assign(state)


_now = threading.local()  # `callback`: of the innermost `fit` or `evaluate`


def _in_scope(own: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`fit` or `evaluate`, with the GlobalMetrics among its callbacks."""
    callbacks = inspect.signature(own).bind(self, *args, **kwargs).arguments.get("callbacks")
    callbacks = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    callback = next((item for item in callbacks if isinstance(item, GlobalMetrics)), None)
    with attributes(_now, {"callback": callback}):
        return own(self, *args, **kwargs)


def _average_first(own: Callable, self: Any, logs: Any = None) -> Any:
    """`CallbackList.on_train_begin`."""
    averages = [i for i, c in enumerate(self.callbacks) if isinstance(c, MetricAverage)]
    for callback in self.callbacks[: max(averages, default=0)]:
        if hasattr(callback, "monitor"):
            required = "come before every callback that monitors a metric"
            received = f"{type(callback).__name__} before it"
            raise unmet("sok.callbacks.MetricAverage()", required, received)
    return own(self, logs)


@hooks.at_init
def _install():
    why = "MetricAverage must come before callbacks that monitor metrics"
    hooks.wrap(tf.keras.callbacks.CallbackList, "on_train_begin", _average_first, why)

    def result(own, self, logs):
        callback = getattr(_now, "callback", None)
        if callback is None:
            return own(self, logs)
        return callback._results(self, logs, lambda: own(self, logs))

    why = "GlobalMetrics adds the states of metrics over ranks"
    for name in ("fit", "evaluate"):
        hooks.wrap(tf.keras.Model, name, _in_scope, why)
    name = "_get_metrics_result_or_logs" if is_keras_3() else "_validate_and_get_metrics_result"
    hooks.wrap(tf.keras.Model, name, result, why)
