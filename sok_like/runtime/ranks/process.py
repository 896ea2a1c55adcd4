"""`sok.rank`, `sok.size`, `sok.local_rank` and `sok.shard`: this process's share of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sok_like.runtime.ranks import comm

if TYPE_CHECKING:
    import tensorflow as tf


def rank() -> int:
    """Number of this process, 0 to `size() - 1`.

    Raises:
        RuntimeError: `sok.Init` has not been called.
    """
    return comm.current().rank


def size() -> int:
    """Number of processes of the job.

    Raises:
        RuntimeError: `sok.Init` has not been called.
    """
    return comm.current().world_size


def local_rank() -> int:
    """Number of this process among those of its host. Use it only to choose a device.

    Raises:
        RuntimeError: `sok.Init` has not been called.
    """
    return comm.current().local_rank


def local_size() -> int:
    """Number of processes of this host."""
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
    import tensorflow as tf

    ranks, mine = size(), rank()
    if ranks == 1:
        return dataset
    length = int(dataset.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(ranks, mine)
    if length != tf.data.UNKNOWN_CARDINALITY:
        total = (length if drop_remainder else length + ranks - 1) // ranks * ranks
        return dataset.repeat().take(total).shard(ranks, mine)
    if not drop_remainder:
        raise ValueError(
            "`dataset` must know its number of elements if drop_remainder is False: see "
            "tf.data.experimental.assert_cardinality. Received: a dataset of unknown cardinality"
        )
    # Keeps only windows that have an element for every rank.
    windows = dataset.window(ranks, drop_remainder=True)

    def own_element(*components):  # a dataset for each component of the window's elements
        window = tf.data.Dataset.zip(components if len(components) > 1 else components[0])
        return window.skip(mine).take(1)

    return windows.flat_map(own_element)
