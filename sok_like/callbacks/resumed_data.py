"""Where the data of a resumed `fit` begins.

    batches of an epoch   | trained before the backup | the rest |
    a resumed `fit`       | read and dropped          | trained  |

Keras restores weights, not the place in the data. So the loop over batches is wrapped: the first
one after a restore reads what was trained and begins behind it, with the batch's own number.
"""

import importlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none

_CALL = "the data of sok.callbacks.BackupAndRestore"


class Progress(NamedTuple):
    """How far a `fit` has come; integers, as in the backup."""

    epoch: int = 0
    batch: int = 0  # trained in this epoch
    taken: int = 0  # trained since the data's beginning, where an epoch is a part of it
    epochs: int = 0  # argument of the `fit`
    is_first: int = 1  # whether its process has trained no epoch before this one
    global_batch_size: int = 0
    ranks: int = 1


class Resumed:
    """A `fit` that goes on behind a backup."""

    def __init__(self, saved: Progress, now: Progress):
        self.saved, self._now = saved, now
        self.batch: int | None = None  # the first one to be trained; None until the data is known
        self.taken = 0

    def wait_for_data(self) -> None:
        """The next loop over batches of this thread is that of the `fit`."""
        _waiting.resumed = self

    def drop(
        self, iterator: Any, dataset: Any, adapter: Any, each_epoch: bool, size: int | None
    ) -> None:
        """Reads what was trained from `iterator` over `dataset`, if it comes again."""
        # Either `each_epoch` begins at the data's beginning, or the data begins again after `size`
        # batches; None: not known.
        saved, communicator = self.saved, comm.current()
        is_first = saved.is_first if each_epoch else not size or saved.taken < size
        taken = saved.batch if each_epoch else saved.taken % (size or saved.taken + 1)

        def why():
            samples, ranks, now = saved.global_batch_size, saved.ranks, self._now
            if samples != now.global_batch_size:
                return f"the global batch size was {samples} and is {now.global_batch_size}"
            if ranks != now.ranks and (samples % ranks or samples % now.ranks):
                return f"{ranks} and {now.ranks} ranks cannot both divide a batch of {samples}"
            if getattr(adapter, "shuffle", False) or getattr(adapter, "_shuffle_sequence", False):
                return _SHUFFLED
            return _other_order(dataset, bool(is_first))

        def read():
            for number in range(taken):
                if next(iterator, None) is None:
                    required = f"have the {taken} batches that were trained before the backup"
                    raise unmet("The data", required, f"{number} batches")

        reasons = list(filter(None, agreed(why if taken else None, communicator, _CALL)))
        self.batch, self.taken = saved.batch, taken
        if reasons:
            self.batch = self.taken = 0
            if communicator.rank == 0:
                warnings.warn(
                    f"sok.callbacks.BackupAndRestore trains {taken} batches a second time, from "
                    f"the beginning of the data in epoch {saved.epoch + 1}: {reasons[0]}.",
                    stacklevel=2,
                )
        else:
            all_or_none(read, communicator)

    def check(self, batch: int | None) -> None:
        """RuntimeError unless `fit` begins with the right batch; None: the epoch has none left."""
        if self.batch is None or batch not in (None, self.batch):
            raise RuntimeError(
                f"A resumed `fit` must begin with batch {self.saved.batch} of epoch "
                f"{self.saved.epoch + 1}, counted from 0. Received: batch {batch}. Keras' own "
                "`fit` must run; no callback may call `evaluate` or `predict` before the first "
                "batch; `steps_per_execution` must be as before"
            )


_waiting = threading.local()
_SHUFFLED = (
    "its order is not that of before. Give `shuffle` a seed and reshuffle_each_iteration=False, "
    "or fit(shuffle=False)"
)
_OVERTAKING = "deterministic=False lets batches overtake each other"


def _other_order(dataset, is_first):
    """Why a dataset may come in another order than in the process before; None if it does not."""
    if not isinstance(dataset, tf.data.Dataset):  # of a tf.distribute strategy
        return "its order is not known"
    if dataset.options().deterministic is False:
        return _OVERTAKING
    for stage in _pipeline(dataset):
        if type(stage).__name__ == "_ParallelInterleaveDataset":  # which keeps only the op
            graph = tf.compat.v1.GraphDef.FromString(stage._as_serialized_graph().numpy())
            if any(node.attr["deterministic"].s == b"false" for node in graph.node):
                return _OVERTAKING
        if getattr(stage, "_deterministic", None) == "false":
            return _OVERTAKING
        if hasattr(stage, "_seed2"):
            again = getattr(stage, "_rerandomize", None)
            again = getattr(stage, "_reshuffle_each_iteration", again)
            no_seed = int(stage._seed) == 0 and int(stage._seed2) == 0
            if no_seed or (again is not False and not is_first):
                return _SHUFFLED
        for wrapped in stage._functions():
            graph = wrapped.function.graph.as_graph_def()
            nodes = [graph.node, *(function.node_def for function in graph.library.function)]
            if any(n.op.startswith(("Shuffle", "RandomShuffle")) for part in nodes for n in part):
                return _SHUFFLED
    return None


def _pipeline(dataset):
    """The dataset and those that it is made of."""
    yield dataset
    for source in dataset._inputs():
        yield from _pipeline(source)


def _take():
    return vars(_waiting).pop("resumed", None)


def _enumerate(own: Any, self: Any) -> Iterator[Any]:
    """The batches of an epoch, under Keras 3."""
    resumed, steps = _take(), own(self)

    def behind():
        for begin, end, iterator in steps:
            if resumed.batch is None:
                data = self._distributed_dataset, self.data_adapter
                resumed.drop(iterator, *data, self.steps_per_epoch is None, self._num_batches)
                self._steps_seen += resumed.taken - resumed.batch
            if begin >= resumed.batch:
                yield begin, end, iterator

    return steps if resumed is None else behind()


def _epochs(own: Any, self: Any) -> Iterator[Any]:
    """The epochs and their iterators, under tf_keras."""
    resumed = _take()
    for epoch, iterator in own(self):
        if resumed is not None and resumed.batch is None:
            steps = self._inferred_steps
            each_epoch = self._adapter.should_recreate_iterator() or (
                steps is not None and steps == self._adapter.get_size()  # arrays, in one iterator
            )
            resumed.drop(iterator, self._dataset, self._adapter, each_epoch, None)
            self._initial_step = resumed.batch
        yield epoch, iterator


@hooks.at_init
def _install():
    def fit(own, *args, **kwargs):
        """A `fit` that raised before its first batch leaves nothing to the next one."""
        try:
            return own(*args, **kwargs)
        finally:
            _take()

    hooks.wrap(tf.keras.Model, "fit", fit, "forgets a resumed fit that has ended")
    why = "a resumed fit begins behind the batches that were trained"
    if is_keras_3():
        owner = importlib.import_module("keras.src.trainers.epoch_iterator").EpochIterator
        hooks.wrap(owner, "_enumerate_iterator", _enumerate, why)
    else:
        owner = importlib.import_module("tf_keras.src.engine.data_adapter").DataHandler
        hooks.wrap(owner, "enumerate_epochs", _epochs, why)
