"""`sok.shard` and the numbers of this process."""

import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm, process


class Rank(comm.SingleProcess):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


@pytest.fixture
def shares(sok):
    """What `sok.shard` gives each rank of a dataset."""

    def shares(dataset, world_size, drop_remainder):
        found = []
        for rank in range(world_size):
            comm.set_current(Rank(rank, world_size))
            share = process.shard(dataset, drop_remainder=drop_remainder)
            found.append([int(number) for number, *_ in share])
        return found

    return shares


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_shares_are_even(shares, length, world_size, is_known):
    features = {"words": tf.ragged.range(tf.range(length))}
    dataset = tf.data.Dataset.from_tensor_slices((tf.range(length), features))
    if not is_known:
        dataset = dataset.filter(lambda *element: True)
    whole = length // world_size
    assert shares(dataset, world_size, True) == [
        [i * world_size + rank for i in range(whole)] for rank in range(world_size)
    ]
    if is_known and length:
        filled = -(-length // world_size)
        assert shares(dataset, world_size, False) == [
            [(i * world_size + rank) % length for i in range(filled)] for rank in range(world_size)
        ]
    elif not is_known and world_size > 1:
        with pytest.raises(ValueError, match="must know its number of elements"):
            shares(dataset, world_size, False)


def test_endless_dataset(shares):
    numbers = tf.data.Dataset.from_tensor_slices((tf.range(5), tf.range(5))).repeat()
    comm.set_current(Rank(1, 2))
    taken = process.shard(numbers, drop_remainder=False).take(5)
    assert [int(number) for number, _ in taken] == [1, 3, 0, 2, 4]


def test_numbers_of_one_process(sok):
    assert (sok.rank(), sok.size(), sok.local_rank()) == (0, 1, 0)


def test_init_comes_first():
    comm.set_current(None)
    for function in (process.rank, process.size, process.local_rank):
        with pytest.raises(RuntimeError, match=r"sok\.Init"):
            function()
