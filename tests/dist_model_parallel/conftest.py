"""The results of the checks that ranks do."""

import pytest


@pytest.fixture
def results(rank_results, world_size):
    """`results(check)`: what each rank found; one launch for all tests."""
    return lambda check: rank_results(world_size, f"dmp.{check}")
