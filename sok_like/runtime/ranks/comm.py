"""The processes of a job and the collectives between them.

A `Communicator` is all that the rest of the package knows of other processes: this process's rank,
the number of ranks, and collectives. One process needs none of them and gets `SingleProcess`.
Several get that of an engine (mpi.py, horovod.py); `engines.py` chooses. All ranks must call every
collective, in graphs under the same name. `exchange_order` keeps them in one order, and `stalls`
names a rank that stays away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import launchers

# "1": TF_CONFIG does not say with how many others this process trains.
_IGNORE_TF_CONFIG = "SOK_IGNORE_TF_CONFIG"

# An attribute of tensors: says of the indices of a sparse gradient that each is there once.
UNIQUE = "_sok_keys_are_unique"
REPEATS = "_sok_repeats"  # mark of a sparse gradient whose equal indices `average` does not sum

# The name of all-to-alls that every rank makes in the same order: each meets the others' next one.
IN_TURN = "in_turn"


class Communicator(Protocol):
    """A process's place among `world_size` ranks, and the collectives between them."""

    rank: int
    world_size: int
    local_rank: int  # this process's number among those of its host
    local_size: int  # number of processes of this host

    def subset(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of this rank's group: groups are disjoint, and the same on all ranks."""
        # RuntimeError if the transport cannot make groups any more.

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends the next `splits[r]` (int32) items of `tensor`, `[sum(splits)]`, to rank r.

        Returns the items received, in rank order, and int32 `[world_size]`: how many each rank
        sent. In a graph the tensor must come from a stateful op, or TensorFlow may compute it
        beforehand, on one rank alone.
        """

    def mean(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """The mean over ranks of each tensor, of one dtype, in one collective."""

    def average(self, tensors: Sequence, name: str) -> list:
        """The mean over ranks of each tensor or `tf.IndexedSlices`; None stays None."""
        results = list(tensors)
        by_dtype: dict[tf.DType, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                values = self.all_gather(tensor.values, f"{name}_values_{i}")
                indices = self.all_gather(tensor.indices, f"{name}_indices_{i}")
                values = values / tf.cast(self.world_size, values.dtype)
                rows = tf.IndexedSlices(values, indices, tensor.dense_shape)
                results[i] = rows if getattr(tensor, REPEATS, False) else distinct(rows)
            elif isinstance(tensor, tf.Tensor):
                by_dtype.setdefault(tensor.dtype, []).append(i)
        for dtype, places in by_dtype.items():
            means = self.mean([tensors[i] for i in places], f"{name}_{dtype.name}")
            for i, tensor in zip(places, means, strict=True):
                results[i] = tf.cast(tensor, dtype)
        return results

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """`tensor` as it is on `root_rank`."""

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The ranks' tensors joined along their first axis, whose length may differ."""

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The sum of the ranks' tensors, which have one shape."""

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """This rank's part of the sum, cut along the first axis; the first parts may be longer."""

    def barrier(self) -> None:
        """Returns when every rank has called it. Eager only."""
        self.all_gather(tf.zeros([1]), "sok_barrier")

    def end_waits(self, reason: str) -> bool:
        """Lets what waits, now or later, raise the reason; False if only shutting down does it."""

    def shut_down(self, seconds: float) -> bool:
        """Ends the transport, once all ranks have called this; False if not within `seconds`."""


class SingleProcess(Communicator):
    """A communicator for one process: every call is a no-op."""

    rank = local_rank = 0
    world_size = local_size = 1

    def subset(self, groups):
        return self

    def all_to_all(self, tensor, splits, name):
        return tensor, splits

    def average(self, tensors, name):
        return list(tensors)

    mean = average

    def broadcast(self, tensor, root_rank, name):
        return tensor

    def all_gather(self, tensor, name):
        return tensor

    sum = reduce_scatter = all_gather

    def barrier(self):
        pass

    def end_waits(self, reason):
        return True

    shut_down = end_waits


def distinct(gradient: Any) -> Any:
    """The gradient with each index once: TensorFlow concatenates those of several lookups."""
    if not isinstance(gradient, tf.IndexedSlices) or getattr(gradient.indices, UNIQUE, False):
        return gradient
    indices, inverse = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, inverse, tf.size(indices))
    setattr(indices, UNIQUE, True)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def summed_values(gradient: Any) -> tf.Tensor:
    """The values of a gradient, dense or sparse, with those of equal indices summed."""
    return distinct(gradient).values if isinstance(gradient, tf.IndexedSlices) else gradient


def run_now(make: Callable[[], Sequence[tf.Tensor]]) -> list:
    """The values of the tensors that `make` returns, also while a graph is being built."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return [tensor.numpy() for tensor in make()]
    # A session of its own, which leaves devices other than the CPU to the program's session.
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return session.run(list(make()))


def launched_world_size() -> int:
    """The number of ranks that were launched, as far as it is known before they meet."""
    of_thread = _of_thread.get()
    if of_thread is not None:
        return of_thread.world_size
    launched, program = launchers.said_world_size()[1], launchers.imported_horovod()
    if program is not None and program.is_initialized():
        launched = program.size()
    text, ignored = (os.environ.get(name, "") for name in ("TF_CONFIG", _IGNORE_TF_CONFIG))
    if launched == 1 and text and ignored in ("", "0") and not is_initialized():
        _check_tf_config(text)
    return launched


def _check_tf_config(text):
    """Raises if this is a worker of several, or a parameter server: it would train alone."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        tasks, task_type = resolver.cluster_spec().as_dict(), resolver.task_type
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"TF_CONFIG must be the JSON of a cluster and a task, or empty ({error}). "
            f"{_IGNORE_TF_CONFIG}=1 ignores it. Received: TF_CONFIG={text!r}"
        ) from error
    workers = sum(len(tasks.get(kind, ())) for kind in ("chief", "master", "worker"))
    # An evaluator is a process by itself, also beside several workers.
    if task_type == "ps" or (workers > 1 and task_type != "evaluator"):
        raise RuntimeError(
            f"TF_CONFIG names {workers} worker(s) and this process as a task of type "
            f"{task_type!r}, but no launcher has connected it with others: it would train a model "
            "of its own. Processes are connected by a launcher such as mpirun, not by TF_CONFIG; "
            "docs/guides/several_ranks.md shows how to start them, and parameter servers are not "
            f"needed. If each process is to train a model of its own, set {_IGNORE_TF_CONFIG}=1. "
            f"Received: TF_CONFIG={text!r}"
        )


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The group that has a rank, for `Communicator.subset`; ValueError if there is none."""
    for group in groups:
        if rank in group:
            return tuple(map(int, group))
    raise ValueError(f"Every rank must be in a group. Received: groups={groups} on rank {rank}")


def check_connected(size: int, engine: str) -> None:
    """RuntimeError if the engine did not find the other processes: each would train alone."""
    variable, launched = launchers.said_world_size()
    if size == 1 and launched > 1:
        raise RuntimeError(
            f"This job was launched with {launched} processes ({variable}={launched}), but "
            f"{engine} found this one alone: it was built without MPI, or for another MPI than "
            "that of the launcher. Start the job with: python -m sok_like.run, or under Slurm "
            "srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH). If each process is to train a "
            f"model of its own, unset {variable}"
        )


_current: Communicator | None = None
_process = os.getpid()  # of the communicator
# Of a thread that is a rank of its own, as in tests; None elsewhere.
_of_thread: ContextVar[Communicator | None] = ContextVar("communicator", default=None)


def current() -> Communicator:
    """The communicator of this process."""
    communicator = _of_thread.get() or _current
    if communicator is None:
        raise RuntimeError(
            "sok.Init must be called before any other call of sok_like. "
            "Received: a call before it; add `sok.Init(global_batch_size=...)` at the start."
        )
    if communicator.world_size > 1 and os.getpid() != _process:
        raise RuntimeError(
            f"Process {_process} is rank {communicator.rank}. A process that it forks is not a "
            f"rank and must not call sok_like. Received: a call in process {os.getpid()}"
        )
    return communicator


def current_or_single() -> Communicator:
    """The communicator of this process; before `sok.Init` that of a single one."""
    return current() if is_initialized() else SingleProcess()


def is_initialized() -> bool:
    """Whether `sok.Init` (or a front door that calls it) has run in this process."""
    return (_of_thread.get() or _current) is not None


def line() -> int:
    """Which exchanges follow each other: 0, or a number for each thread that is a rank."""
    return getattr(_of_thread.get(), "line", 0)


def set_current(communicator: Communicator | None) -> None:
    """Replaces the communicator; None forgets it. A thread that is a rank keeps its own."""
    global _current, _process
    if communicator is not None and communicator.world_size > 1:
        hooks.open_door(hooks.RANKS)
    if not line():
        _current, _process = communicator, os.getpid()


def set_of_thread(communicator: Communicator) -> None:
    """Makes this thread a rank of its own, with a `line` that no other one has."""
    hooks.open_door(hooks.RANKS)
    _of_thread.set(communicator)
