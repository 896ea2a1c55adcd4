"""The promises of a communicator, on every engine alike (engine_contract.py)."""

import os

import pytest

from tests.ranks import run_ranks, skip_many_ranks
from tests.runtime.ranks import engine_contract

ROUNDS = 2000 if os.environ.get("SLOW") else 30
TARGET = "tests.runtime.ranks.engine_contract"


@pytest.mark.parametrize(
    "engine, num_ranks",
    [
        pytest.param("mpi", 2, marks=pytest.mark.ranks),
        pytest.param("horovod", 2, marks=pytest.mark.ranks),
        pytest.param("mpi", 3, marks=[pytest.mark.ranks, pytest.mark.slow]),
        *[("memory", 3), ("single", 1)],
    ],
)
def test_promises(on_threads, engine, num_ranks):
    skip_many_ranks(num_ranks)
    if engine in ("single", "memory"):
        on_threads(num_ranks, engine_contract.run, engine, 12)
        return
    env = {"SOK_ENGINE": engine, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    args = {"engine": engine, "rounds": ROUNDS}
    run_ranks(f"{TARGET}:run", num_ranks, args=args, env=env)


@pytest.mark.ranks
@pytest.mark.parametrize("level", [1, 3])
def test_mpi_that_the_program_has_initialised(level):
    run, env = f"{TARGET}:initialised_before", {"SOK_ENGINE": "mpi"}
    for result, ended in run_ranks(run, 2, args={"level": level}, env=env):
        assert not ended  # the program does it
        if level == 3:
            assert result == 2.0
        else:
            assert "MPI_THREAD_MULTIPLE" in result and "by the program" in result


@pytest.mark.ranks
@pytest.mark.parametrize("horovod_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_mpi_beside_horovod(horovod_first):
    run, args = f"{TARGET}:beside_horovod", {"horovod_first": horovod_first}
    assert run_ranks(run, 2, args=args, env={"SOK_ENGINE": "mpi"}) == [(2.0, 2.0)] * 2
