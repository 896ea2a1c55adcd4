"""`sok.Init`, once per process; then `sok.rank`, `sok.size` and `sok.shard`: its share of a job."""

import secrets
import warnings
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import as_integer, require, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.native import freed_memory, libraries
from sok_like.runtime.ranks import comm, engines, exchange_order, stalls

_arguments: dict[int, dict] = {}  # of `Init`, by the line of ranks: threads have their own


def Init(*, global_batch_size: int, seed: int | None = None, **kwargs: Any):
    """Initializes the package in this process.

    One process needs nothing else. Several (`python -m sok_like.run -np 2 ...`) exchange by MPI, or
    by Horovod if the program has imported it or the environment asks for it. This call initialises
    either, unless the program has done so.

    Args:
        global_batch_size: Samples of a training step, summed over all ranks. At least one per rank;
            nothing else depends on it. It need not be a multiple of the number of ranks, and
            batches may differ between steps and ranks.
        seed: Seed of initial rows. All ranks use rank 0's; a warning is printed where ranks
            disagree. None: a random seed, drawn on rank 0.
        **kwargs: Ignored, with a warning that names them.

    Returns:
        `'OK'` as a string tensor. In a `tf.compat.v1` graph, the op to run before any other:
        `sess.run(sok_init)`.

    Raises:
        TypeError: `global_batch_size` is missing or not an integer; `seed` is not an integer.
        ValueError: `global_batch_size` is smaller than the number of ranks; `seed` is outside
            `[-2**63, 2**63)`; TF_CONFIG cannot be read.
        ImportError: there are several processes, and neither MPI nor Horovod can be loaded; or the
            running TensorFlow or Keras lacks a function that must be wrapped.
        RuntimeError: called again with other arguments (the same ones are legal), within a
            `tf.distribute` strategy of several replicas, or in one process of several that
            TF_CONFIG names and no launcher has connected.
    """
    if kwargs:
        warnings.warn(
            "sok.Init knows `global_batch_size` and `seed`, and ignores other arguments. "
            f"Received: {_format(kwargs)}",
            stacklevel=2,
        )
    seed, batch = _checked_seed(seed), as_integer(global_batch_size)
    if batch is None:
        raise wrong_argument("global_batch_size", "an integer", global_batch_size, error=TypeError)
    arguments = {"global_batch_size": batch, "seed": seed}
    earlier = _arguments.get(comm.line())
    if earlier not in (None, arguments):
        raise RuntimeError(
            f"sok.Init has been called before, with {_format(earlier)}; it can be repeated only "
            f"with the same arguments. Received: {_format(arguments)}"
        )
    check_replicas()
    communicator = comm.current() if comm.is_initialized() else engines.choose()
    required = f"at least the number of ranks, {communicator.world_size}"
    require(batch >= communicator.world_size, "global_batch_size", required, batch)
    _start(communicator)
    _arguments[comm.line()] = arguments
    if earlier is not None and tf.executing_eagerly():
        return tf.constant("OK")
    return _agree_on_seed(communicator, seed)


def global_batch_size() -> int:
    """The argument of `sok.Init`; 0 before it."""
    return _arguments.get(comm.line(), {}).get("global_batch_size", 0)


def check_replicas() -> None:
    """Raises RuntimeError within a `tf.distribute` strategy of more than one replica."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise RuntimeError(
            "A process of sok_like is one replica: start one process for each device, by "
            "`python -m sok_like.run` or mpirun, and leave the tf.distribute strategy out. "
            f"Received: a strategy of {replicas} replicas"
        )


def ensure_initialized(seed: int | None = None, groups_later: bool = False) -> None:
    """Stands for `Init` in front doors; acts at once, also while a graph is being built."""
    if comm.is_initialized():
        return
    seed = _checked_seed(seed)
    communicator = engines.choose(groups_later)
    _start(communicator)
    comm.run_now(lambda: [_agree_on_seed(communicator, seed)])


def _start(communicator):
    hooks.install_all()
    freed_memory.keep()
    comm.set_current(communicator)
    stalls.start(communicator)


def reset() -> None:
    """Forgets `Init`, for tests. Tables that exist keep their seed."""
    _arguments.pop(comm.line(), None)
    comm.set_current(None)


def _checked_seed(seed):
    if seed is None:
        return None
    integer = as_integer(seed)
    if integer is None:
        raise wrong_argument("seed", "an integer or None", seed, error=TypeError)
    require(-(2**63) <= integer < 2**63, "seed", "in [-2**63, 2**63)", seed)
    return integer


def _agree_on_seed(communicator, seed):
    """Broadcasts rank 0's seed and hands it to the op library; returns `'OK'` after that."""
    own = secrets.randbelow(2**31 - 1) if seed is None else seed
    own = agreed = tf.constant(own, tf.int64, name="sok_seed")
    done = []
    if communicator.world_size > 1:
        seeds, _ = exchange_order.exchange_notes(own[tf.newaxis], communicator, "sok_init")
        agreed = seeds[0]
        if seed is not None:
            problem = "sok.Init: `seed` must be the same on all ranks. Received:"
            received = (own, f"on rank {communicator.rank} and", agreed)
            rest = "on rank 0; rank 0's is used."
            differ = tf.not_equal(own, agreed)
            done.append(tf.cond(differ, lambda: tf.print(problem, *received, rest), tf.no_op))
    done.append(libraries.ops().sok_set_seed(seed=agreed))
    with tf.control_dependencies([op for op in done if op is not None]):
        return tf.identity(tf.constant("OK"), name="sok_init")


def _format(arguments):
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def rank() -> int:
    """Number of this process, 0 to `size() - 1`; RuntimeError before `sok.Init`."""
    return comm.current().rank


def size() -> int:
    """Number of processes of the job; RuntimeError before `sok.Init`."""
    return comm.current().world_size


def local_rank() -> int:
    """Number of this process among those of its host, to choose a device; see `rank`."""
    return comm.current().local_rank


def local_size() -> int:
    """Number of processes of this host; see `rank`."""
    return comm.current().local_size


def shard(dataset: tf.data.Dataset, *, drop_remainder: bool) -> tf.data.Dataset:
    """This rank's share of a dataset. Every rank gets the same number of elements.

    Element i goes to rank `i % size()`. Every lookup involves all ranks, so a rank with one batch
    more than another would wait forever. Call it before `batch`: a global batch of `sok.Init` is
    then `global_batch_size // size()` elements here.

    Args:
        dataset: Has the same elements in the same order on all ranks: shuffle it with a seed, or
            after this call.
        drop_remainder: What to do if the number of elements is not a multiple of the number of
            ranks. True drops the last elements. False repeats elements from the start.

    Raises:
        ValueError: `drop_remainder` is False and the dataset does not know its number of elements;
            set it by `dataset.apply(tf.data.experimental.assert_cardinality(n))`.
        RuntimeError: `sok.Init` has not been called.
    """
    ranks, own_rank = size(), rank()
    if ranks == 1:
        return dataset
    length = int(dataset.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(ranks, own_rank)
    if length != tf.data.UNKNOWN_CARDINALITY:
        total = (length if drop_remainder else length + ranks - 1) // ranks * ranks
        return dataset.repeat().take(total).shard(ranks, own_rank)
    if not drop_remainder:
        raise ValueError(
            "`dataset` must know its number of elements if drop_remainder is False: see "
            "tf.data.experimental.assert_cardinality. Received: a dataset of unknown cardinality"
        )
    # Keeps only windows that have an element for every rank.
    windows = dataset.window(ranks, drop_remainder=True)

    def own_element(*components):  # a dataset for each component of the window's elements
        window = tf.data.Dataset.zip(components if len(components) > 1 else components[0])
        return window.skip(own_rank).take(1)

    return windows.flat_map(own_element)
