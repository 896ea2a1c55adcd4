"""Distributing test rows over ranks and collecting their results, without launching ranks."""

import pathlib
import sys
import types

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import flights_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 7, 24, 25])
def test_join_restores_the_order_of_the_rows(sok, world_size, num_rows):
    ranks = flights_ranks.Ranks()
    ranks.size = world_size
    values = np.random.default_rng(0).random(num_rows).astype(np.float32)
    parts = []
    for ranks.rank in range(world_size):
        rows = ranks.shard(num_rows, local_batch=4)
        parts.append(values[rows].ravel())
    assert len({part.shape for part in parts}) == 1
    joined = flights_ranks.tf.concat(parts, axis=0)  # the ranks are all in this process
    ranks._communicator = types.SimpleNamespace(all_gather=lambda tensor, name: joined)
    assert (ranks.join(parts[0], num_rows) == values).all()


def test_one_rank_needs_no_other(sok):
    ranks = flights_ranks.Ranks()
    assert (ranks.rank, ranks.size, ranks.sum(5)) == (0, 1, 5)
