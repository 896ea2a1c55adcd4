"""Launches of `rank_checks.run`, one for each number of ranks, for all tests of this folder."""

import functools

import pytest

from tests.ranks import once_per_run

# 3 ranks only train, but with SLOW=1, as `make test-all` sets it.
MARKS = {1: [], 2: [pytest.mark.ranks], 3: [pytest.mark.ranks, pytest.mark.slow]}
WORLDS = [pytest.param(n, marks=marks, id=f"{n}") for n, marks in MARKS.items()]
each_world = pytest.mark.parametrize("world_size", WORLDS)


@functools.cache
def launch(world_size):
    """What the ranks returned, or the exception that ended them: nothing is launched twice."""
    if world_size == 1:
        from tests.dist_model_parallel import rank_checks

        return [rank_checks.run()]
    quick = {"HOROVOD_CYCLE_TIME": "0.2", "OMPI_MCA_mpi_yield_when_idle": "1"}
    target = "tests.dist_model_parallel.rank_checks:run"
    return once_per_run(f"dmp{world_size}", target, world_size, env=quick)
