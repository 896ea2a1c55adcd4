"""The results of the checks that ranks do."""

import pytest

from tests.dist_model_parallel.launches import launch
from tests.ranks import RanksFailed, skip_many_ranks


@pytest.fixture
def results(sok, world_size):
    """`results(check)`: what each rank found; one launch for all tests."""
    skip_many_ranks(world_size)

    def found(check):
        ranks = launch(world_size)
        if isinstance(ranks, RanksFailed):
            pytest.fail(str(ranks), pytrace=False)
        for rank, result in enumerate(ranks):
            assert not isinstance(result[check], str), f"rank {rank}: {result[check]}"
        return [result[check] for result in ranks]

    return found
