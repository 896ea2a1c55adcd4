"""Prints what is installed, where, and what it supports, and tests whether it works:

    python -m sok_like
    python -m sok_like.run -np 2 -m sok_like

The exit status is 1 if something that one process needs is missing or broken.
"""

import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Iterator

from sok_like.install_horovod import installed
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import launchers


def versions() -> Iterator[tuple[str, str]]:
    """Pairs (component with version, details or place); ImportError if one is missing."""
    import sok_like

    yield f"sok_like {sok_like.__version__}", os.path.dirname(sok_like.__file__)
    yield f"Python {sys.version.split()[0]}", sys.executable
    _ = sok_like.size  # without TensorFlow, says how to install it
    import tensorflow as tf

    yield f"TensorFlow {tf.version.VERSION}", os.path.dirname(tf.__file__)
    from sok_like.runtime.framework.running_keras import is_keras_3

    # Not `tf.keras`, which may have no version.
    keras = importlib.import_module("keras" if is_keras_3() else "tf_keras")
    yield f"Keras {keras.__version__}", "in use"
    yield "tf_keras", installed("tf_keras") or "no; only needed for TF_USE_LEGACY_KERAS=1"
    from sok_like.runtime.native import libraries
    from sok_like.runtime.ranks.engines import engine_of_job

    libraries.ops()
    core = libraries.core()
    yield "op library", str(libraries.ops_path())
    yield "NumPy module", str(core.__file__)
    try:
        yield "CUDA", f"{core.cuda_device_info()['name']}, {core.cuda_device_count()} device(s)"
    except RuntimeError as error:
        yield "CUDA", f"no: {error}"
    yield "MPI", launchers.mpi_library() or f"no. {launchers.NO_MPI}"
    library = launchers.horovod_library()
    if library is None:
        yield "Horovod", f"no. {launchers.NO_HOROVOD}"
    else:
        transports = {"mpirun": "MPI", "gloo": "Gloo"}
        features = " and ".join(transports[name] for name in launchers.horovod_transports())
        yield f"Horovod {installed('horovod')}", f"{features}; {library.parent.parent}"
        for program in ("mpirun", "horovodrun"):
            yield program, launchers.find_program(program) or "no"
    name, why = engine_of_job()
    yield "engine of ranks", f"{'MPI' if name == 'mpi' else 'Horovod'}: {why}"


def self_test() -> str:
    """Trains one step on every rank and compares rows with NumPy; returns how many processes."""
    import numpy as np
    import tensorflow as tf

    import sok_like as sok

    sok.Init(global_batch_size=1024, seed=7)
    ranks, rank = sok.size(), sok.rank()
    table = sok.EmbeddingVariable(4, initializer="ones", name="self_test")
    # Keys shared by all ranks, keys of one rank only, and one key twice.
    keys_of = [[*range(8), *range(10**15 * (r + 1), 10**15 * (r + 1) + 8), 3] for r in range(ranks)]
    keys = tf.constant(keys_of[rank], tf.int64)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.25))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (rows,) = sok.group_embedding_lookup([table], [keys], gradient_scale="sum")
            loss = tf.reduce_sum(rows * [1.0, 2.0, 3.0, 4.0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step()
    (rows,) = sok.group_embedding_lookup([table], [keys], training=False)
    times = np.array([sum(other.count(key) for other in keys_of) for key in keys_of[rank]])
    expected = 1 - 0.25 * times[:, np.newaxis] * np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(rows.numpy(), expected.astype(np.float32))
    return "1 process" if ranks == 1 else f"{ranks} processes"


def wrapped() -> list[tuple[str, str, str]]:
    """Wraps all that any feature needs of TensorFlow and Keras; returns `hooks.listing()`."""
    import sok_like

    for module in pkgutil.walk_packages(sok_like.__path__, "sok_like."):
        if not module.name.endswith(("__main__", "_ops", "_mpi")):
            importlib.import_module(module.name)
    for door in hooks.doors():
        hooks.open_door(door)
    importlib.import_module("sok_like.lookup.replicas").comparison()  # only ranks call it
    return hooks.listing()


def main() -> None:
    """Prints one line per pair, the functions that are wrapped, and the result of the self-test."""
    start = time.monotonic()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    lines = []
    try:
        for what, where in versions():
            lines.append(f"{what:<20} {where}")
        done = self_test()
        wrapped()
    except (ImportError, AssertionError) as error:
        print(*lines, sep="\n")
        raise SystemExit(f"{'FAILED':<20} {error}") from None
    from sok_like.runtime.framework import private_names
    from sok_like.runtime.ranks.initialize import rank

    if rank() == 0:
        print(*lines, sep="\n")
        for door in (*hooks.doors(), hooks.SCOPES):
            for name, why, state in hooks.listing(door):
                print(f"{f'wrapped, {door}':<20} {name}, {state}: {why}")
        for owner, names in private_names.table().items():
            print(f"{'read':<20} {owner}: {' '.join(names)}")
        print(f"{'self-test':<20} passed on {done}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
