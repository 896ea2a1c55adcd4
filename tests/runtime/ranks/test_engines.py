"""The promises of a communicator, on every engine alike (engine_contract.py)."""

import functools
import os
import traceback

import pytest

from tests import thread_ranks
from tests.ranks import RanksFailed, run_ranks, skip_many_ranks
from tests.runtime.ranks import engine_contract

ROUNDS = 2000 if os.environ.get("SLOW") else 30
PROMISES = (
    *("exchanges", "gathers", "sums", "averages", "order", "concurrency", "late", "groups"),
    *("large", "disagreement", "forked", "counted"),
)
NOT_OF = {"mpi": ("counted",), "horovod": ("large", "disagreement", "forked")}
NOT_OF["memory"] = NOT_OF["single"] = NOT_OF["mpi"] + NOT_OF["horovod"]


def results_of(engine, num_ranks):
    """What each rank found; one launch for all tests."""
    results = _results(engine, num_ranks)
    if isinstance(results, RanksFailed):
        pytest.fail(str(results), pytrace=False)
    return results


@functools.cache
def _results(engine, num_ranks):
    env = {"SOK_ENGINE": engine, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    arguments = {"engine": engine, "rounds": ROUNDS}
    if engine == "single":
        return [engine_contract.run(engine, ROUNDS)]
    if engine == "memory":
        found = thread_ranks.run(num_ranks, lambda: engine_contract.run(engine, ROUNDS))
        failed = [result for result in found if isinstance(result, BaseException)]
        return RanksFailed("".join(traceback.format_exception(failed[0]))) if failed else found
    try:
        return run_ranks(
            "tests.runtime.ranks.engine_contract:run", num_ranks, args=arguments, env=env
        )
    except RanksFailed as error:
        return error


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    "engine, num_ranks",
    [
        pytest.param("mpi", 2, marks=pytest.mark.ranks),
        pytest.param("horovod", 2, marks=pytest.mark.ranks),
        pytest.param("mpi", 3, marks=[pytest.mark.ranks, pytest.mark.slow]),
        *[("memory", 3), ("single", 1)],
    ],
)
def test_promise(sok, engine, num_ranks, promise):
    skip_many_ranks(num_ranks)
    if promise in NOT_OF[engine]:
        pytest.skip(f"not a promise of {engine}")
    for rank, faults in enumerate(results_of(engine, num_ranks)):
        assert faults[promise] == [], f"rank {rank}"


@pytest.mark.ranks
def test_losses_do_not_depend_on_the_engine():
    by_mpi, by_horovod = (results_of(engine, 2) for engine in ("mpi", "horovod"))
    for one, other in zip(by_mpi, by_horovod, strict=True):
        assert len(set(one["losses"])) > 1
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)


@pytest.mark.ranks
@pytest.mark.beside
@pytest.mark.parametrize("level", [1, 3])
def test_mpi_that_the_program_has_initialised(level):
    target = "tests.runtime.ranks.engine_contract:initialised_before"
    env = {"SOK_ENGINE": "mpi"}
    for result, ended in run_ranks(target, 2, args={"level": level}, env=env, alone=False):
        assert not ended  # the program does it
        if level == 3:
            assert result == 2.0
        else:
            assert "MPI_THREAD_MULTIPLE" in result and "by the program" in result


@pytest.mark.ranks
@pytest.mark.beside
@pytest.mark.parametrize("horovod_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_mpi_beside_horovod(horovod_first):
    target = "tests.runtime.ranks.engine_contract:beside_horovod"
    args, env = {"horovod_first": horovod_first}, {"SOK_ENGINE": "mpi"}
    assert run_ranks(target, 2, args=args, env=env, alone=False) == [(2.0, 2.0)] * 2
