"""Several ranks have the cores to themselves, while xdist's other workers wait.

Ranks wait for each other some ten times a step. Beside another busy process each of these waits
lasts a slice of the scheduler, and all together several times as long as the ranks need alone.

    a test               shares the cores with the tests of other workers
    a launch of ranks    alone(), but where they hardly exchange
    waiting for a launch that another worker makes    lent()
"""

import contextlib
import fcntl
import gc
import itertools
import os
import pathlib
import tempfile

_cleared = itertools.count(1)
_held = None  # the file, locked, of the test that runs


def collect_seldom():
    """Python looks for garbage less often: traces of TensorFlow's stay and are large."""
    gc.set_threshold(500_000, 20, 10)


def clear_session():
    """Keras' function. Of many traces, its search for garbage takes a second: seldom, too."""
    import tensorflow as tf

    from sok_like.runtime.framework.running_keras import is_keras_3

    collects = {"free_memory": next(_cleared) % 16 == 0} if is_keras_3() else {}
    tf.keras.backend.clear_session(**collects)


def start_fast():
    """Has every process that is started from now on leave out what Keras imports for nobody."""
    own = str(pathlib.Path(__file__).resolve().parent / "start_fast")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if own not in paths:
        from tests.start_fast import sitecustomize  # noqa: F401 (and this process, too)

        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, own])


def tune_no_datasets():
    """tf.data without the threads that tune it.

    An iterator that is deleted waits for its thread. TensorFlow tells the thread to stop before it
    says so where the thread looks, so now and then the thread sleeps on, up to a minute. In tests
    this is an idle minute of all ranks, whenever Python collects garbage.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    options = tf.data.Options()
    options.autotune.enabled = False

    def untuned(dataset):
        return dataset_ops._OptionsDataset(dataset, options)

    dataset_ops.DatasetV2._apply_debug_options = untuned


def optimize_no_graphs():
    """TensorFlow without its graph optimiser: a tenth of the time in which ranks train little."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def folder():
    """Where the workers of a test run leave what more than one of them wants."""
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return folder_of(run)


def folder_of(pid):
    """That of the pytest process `pid`."""
    return pathlib.Path(tempfile.gettempdir(), f"sok_tests_{pid}")


@contextlib.contextmanager
def shared():
    """For the time of a test; does nothing where there is one worker."""
    global _held
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with _locked(fcntl.LOCK_SH) as _held:
        try:
            yield
        finally:
            _held = None


@contextlib.contextmanager
def lent():
    """Gives the test's share away for a time; within such a time it does nothing."""
    global _held
    if _held is None:
        yield
        return
    # Forgotten while it is away: who takes it back twice waits for the gate with a share in hand,
    # and whoever has the gate waits for that share.
    file, _held = _held, None
    fcntl.flock(file, fcntl.LOCK_UN)
    try:
        yield
    finally:
        _take(file, fcntl.LOCK_SH)
        _held = file


@contextlib.contextmanager
def alone():
    """Until all other tests have paused, then for the time of a launch."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with lent(), _locked(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _locked(kind):
    folder().mkdir(exist_ok=True)
    with open(folder() / "cores.lock", "w") as file:
        _take(file, kind)
        yield file


def _take(file, kind):
    # Through a gate, so that tests that follow each other do not keep a launch from its turn.
    with open(folder() / "gate.lock", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(file, kind)
