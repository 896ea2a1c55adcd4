"""Settings for every test: quiet TensorFlow, and no `gpu` tests where there is no device."""

import functools
import gc
import os
import pathlib
import shutil
import sys

import pytest

from tests import asked_checks, checks, cores, emulated, fake_gpu
from tests.ranks import RanksFailed, once_per_run, skip_many_ranks

# Before anything imports TensorFlow, which reads it once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")  # a rank that is a thread may wait in one
cores.collect_seldom()
cores.start_fast()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not one of xdist's workers
        os.environ.pop("PYTEST_XDIST_WORKER", None)  # of a run whose test started this one
        shutil.rmtree(cores.folder_of(os.getpid()), ignore_errors=True)
    if fake_gpu.asked_for():
        config.pluginmanager.register(fake_gpu.Plugin())
    elif emulated.asked_for():
        emulated.install()


def pytest_sessionfinish(session):
    gc.freeze()  # pytest collects garbage in the end, of hundreds of traces
    if not hasattr(session.config, "workerinput"):
        shutil.rmtree(cores.folder_of(os.getpid()), ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's time limit begins behind it
def pytest_runtest_protocol():
    with cores.shared():
        return (yield)


def pytest_ignore_collect(collection_path, config):
    """With `-m keras`, files without that marker need not be imported."""
    is_file = config.option.markexpr == "keras" and collection_path.match("test_*.py")
    return True if is_file and "mark.keras" not in collection_path.read_text() else None


def may_have_device(folder=pathlib.Path("/dev")):
    """By the device files, because asking TensorFlow takes seconds and memory of the device.

    A container may have been given any of a machine's devices, and under WSL there is another file.
    """
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def pytest_collection_finish(session):
    global _selected
    _selected = session.items  # the same in every worker
    if "tensorflow" in sys.modules:  # as in every worker, but not in the process that has workers
        cores.tune_no_datasets()


def _is_slow(item):
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    others = item.iter_markers("keras") if legacy else ()
    return "slow" in item.keywords or any(mark.kwargs.get("slow") for mark in others)


def pytest_collection_modifyitems(config, items):
    if not os.environ.get("SLOW"):  # `make test-all` sets it
        config.hook.pytest_deselected(items=[item for item in items if _is_slow(item)])
        items[:] = [item for item in items if not _is_slow(item)]
    # First the files whose ranks have the cores to themselves: a launch would wait for the others.
    alone = {i.path for i in items if "ranks" in i.keywords and "beside" not in i.keywords}
    items.sort(key=lambda item: item.path not in alone)
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
    from sok_like.runtime.ranks import initialize

    initialize.reset()
    sok_like.Init(global_batch_size=12, seed=7)
    yield sok_like
    initialize.reset()


@functools.cache
def _results_of_one_rank(check):
    """In this process, which runs a check when a test first asks for it."""
    return [checks.run(1, [check], str(cores.folder() / "files"))]


_results_on_threads = functools.cache(checks.run_on_threads)


@functools.cache
def _results(world_size):
    """What the ranks returned, or the exception that ended them: nothing is launched twice."""
    groups = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # meshes with two axes are groups of ranks
    only = [c for c in asked_checks.of(_selected, world_size) if not checks.on_threads(c)]
    arguments = {"world_size": world_size, "only": only, "folder": str(cores.folder() / "files")}
    return once_per_run(f"checks{world_size}", "tests.checks:run", world_size, arguments, groups)


@pytest.fixture
def rank_results(sok):
    """`rank_results(world_size, "module.check")`: what each rank found; one launch a session."""
    if emulated.asked_for() and not fake_gpu.asked_for():
        pytest.skip("some of the checks' tables are not for devices")

    def results(world_size, check):
        skip_many_ranks(world_size)
        if checks.is_slow(world_size, check):
            pytest.skip(f"{check} on {world_size} ranks is for SLOW=1")
        if world_size > 1 and checks.on_threads(check):
            ranks = [{check: result} for result in _results_on_threads(world_size, check)]
        else:
            ranks = _results_of_one_rank(check) if world_size == 1 else _results(world_size)
        if isinstance(ranks, RanksFailed):
            pytest.fail(str(ranks), pytrace=False)
        assert all(check in result for result in ranks), (
            f"{check} was not made: tests/asked_checks.py"
        )
        found = [result[check] for result in ranks]
        for rank, result in enumerate(found):
            assert type(result).__name__ != "Raised", f"rank {rank}: {result!r}"
        return [checks.computed(result) for result in found]

    return results
