"""Settings for every test: quiet TensorFlow, and no `gpu` tests where there is no device."""

import functools
import os
import pathlib

import pytest

from tests import emulated
from tests.ranks import RanksFailed, run_ranks, skip_many_ranks

# Before anything imports TensorFlow, which reads it once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_configure():
    if emulated.asked_for():
        emulated.install()


def may_have_device(folder=pathlib.Path("/dev")):
    """By the device files, because asking TensorFlow takes seconds and memory of the device.

    A container may have been given any of a machine's devices, and under WSL there is another file.
    """
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def pytest_collection_modifyitems(items):
    # A worker per core: a file stays together for what its tests share, and so do all that share
    # the launches of `rank_results`.
    for item in items:
        shares_launch = "rank_results" in getattr(item, "fixturenames", ())
        name = "rank_results" if shares_launch else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(name))
    # Where a device is required (tools/check_gpu.sh), a test that finds none fails.
    if may_have_device() or os.environ.get("SOK_TEST_GPU") == "required":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def sok():
    """The package, newly initialised for one process."""
    import sok_like
    from sok_like.runtime import initialize

    initialize.reset()
    sok_like.Init(global_batch_size=12, seed=7)
    yield sok_like
    initialize.reset()


@functools.cache
def _results(world_size):
    """What the ranks returned, or the exception that ended them: nothing is launched twice."""
    if world_size == 1:
        from tests.checks import run

        return [run(world_size)]
    # The steps are small, and waiting is most of their time: cycles in ms, no spinning.
    quick = {"HOROVOD_CYCLE_TIME": "0.2", "OMPI_MCA_mpi_yield_when_idle": "1"}
    quick["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # meshes with two axes are groups of ranks
    try:
        return run_ranks(
            "tests.checks:run", world_size, args={"world_size": world_size}, env=quick, timeout=500
        )
    except RanksFailed as error:
        return error


@pytest.fixture
def rank_results(sok):
    """`rank_results(world_size, "module.check")`: what each rank found; one launch a session."""

    if emulated.asked_for():
        pytest.skip("some of the checks' tables are not for devices")

    def results(world_size, check):
        skip_many_ranks(world_size)
        if isinstance(_results(world_size), RanksFailed):
            pytest.fail(str(_results(world_size)), pytrace=False)
        found = [result[check] for result in _results(world_size)]
        for rank, result in enumerate(found):
            assert type(result).__name__ != "Raised", f"rank {rank}: {result!r}"
        return found

    return results
