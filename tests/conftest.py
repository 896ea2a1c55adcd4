"""Settings for every test: quiet TensorFlow, and no `gpu` tests where there is no device."""

import functools
import gc
import os
import pathlib
import sys
import tempfile

import pytest

from tests import emulated, fake_gpu, forks, ready_ranks, speed
from tests.emulated import may_have_device
from tests.ranks import RanksFailed, skip_many_ranks

# Before anything imports TensorFlow, which reads it once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")  # a rank that is a thread may wait in one
speed.collect_seldom()


def pytest_configure(config):
    if fake_gpu.asked_for():
        config.pluginmanager.register(fake_gpu.Plugin())
    elif emulated.asked_for():
        emulated.install()
    if config.getoption("numprocesses", None) and not may_have_device():
        forks.share()


def pytest_sessionfinish(session):
    ready_ranks.close()
    gc.freeze()  # pytest collects garbage in the end, of hundreds of traces


def pytest_ignore_collect(collection_path, config):
    """With `-m keras`, files without that marker need not be imported."""
    is_file = config.option.markexpr == "keras" and collection_path.match("test_*.py")
    return True if is_file and "mark.keras" not in collection_path.read_text() else None


def pytest_collection_finish():
    if "tensorflow" in sys.modules:  # as in every worker, but not in the process that has workers
        speed.tune_no_datasets()
    gc.freeze()  # what was imported stays: no search for garbage looks at it


def _is_slow(item):
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    others = item.iter_markers("keras") if legacy else ()
    return "slow" in item.keywords or any(mark.kwargs.get("slow") for mark in others)


def pytest_collection_modifyitems(config, items):
    if not os.environ.get("SLOW"):  # `make test-all` sets it
        config.hook.pytest_deselected(items=[item for item in items if _is_slow(item)])
        items[:] = [item for item in items if not _is_slow(item)]
    # First the files that start ranks, which take longest: no worker ends with one of them.
    with_ranks = {item.path for item in items if "ranks" in item.keywords}
    items.sort(key=lambda item: item.path not in with_ranks)
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


_done = {}  # what ranks returned or raised: nothing is done twice


def _run(on_threads, world_size, function, args):
    if world_size > 1 and not on_threads:
        return ready_ranks.run(world_size, function, args)
    from tests import thread_ranks  # loads TensorFlow

    speed.clear_session()
    speed.tune_no_datasets()
    if world_size == 1:
        return [function(*args)]
    return thread_ranks.run(world_size, functools.partial(function, *args))


def _results(on_threads, world_size, function, args):
    in_suite = "SOK_TEST_RANKS" in os.environ  # of tests/cuda/test_ops.py
    if emulated.asked_for() and not fake_gpu.asked_for() and not in_suite:
        pytest.skip("some of the checks' tables are not for devices")
    skip_many_ranks(world_size)
    call = (on_threads, world_size, function, repr(args))
    try:
        if call not in _done:
            _done[call] = _run(on_threads, world_size, function, args)
    except RanksFailed as error:
        pytest.fail(str(error), pytrace=False)
    found = _done[call]
    errors = [result for result in found if isinstance(result, BaseException)]
    # Of a rank that has failed rather than of those that waited for it.
    for error in sorted(errors, key=lambda error: type(error).__name__ == "Left"):
        raise error
    for rank, result in enumerate(found):
        assert not isinstance(result, ready_ranks.Raised), f"rank {rank}: {result!r}"
    return found


@pytest.fixture
def on_threads(sok, tmp_path_factory, monkeypatch):
    """`on_threads(2, function, *args)`: what it returns on each rank, a thread of this process."""
    # Where functions leave files for other ranks.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
    return lambda world_size, function, *args: _results(True, world_size, function, args)


@pytest.fixture
def on_processes(on_threads):
    """`on_processes(2, function, *args)`: what it returns on each rank, a process."""
    return lambda world_size, function, *args: _results(False, world_size, function, args)


@pytest.fixture
def folder():
    """An empty one on a disk, which that of temporary files may not be."""
    out = forks.ROOT / "out"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as path:
        yield pathlib.Path(path)


@pytest.fixture
def graph(sok):
    """A graph to build in; `sok.Init` has to be called in it again, as in a script of its own."""
    import tensorflow as tf

    from sok_like.runtime.ranks import initialize

    initialize.reset()
    with tf.Graph().as_default() as graph:
        yield graph
