"""The op library whose kernels for device tables run on emulated devices, in host memory.

`SOK_TEST_OPS=emulated pytest tests/...` runs tests over it, in this process and in the ranks it
starts: the same tests, with every table in "device memory" (cpp/tests/emulator). It comes with the
C++ tests, and takes the place of `_ops.so`: a process can register an op but once.

`SOK_TEST_OPS=fake_gpu` has these kernels for TensorFlow's device "GPU" (tests/fake_gpu.py).
"""

import os
import pathlib
import sys

import pytest


def _build_folder():
    """Where the C++ was compiled for this Python: for that of `.venv-2.21.0`, `build-2.21.0`."""
    environment = pathlib.Path(sys.prefix).name
    other = environment.removeprefix(".venv") if environment.startswith(".venv-") else ""
    root = pathlib.Path(__file__).resolve().parent.parent
    return root / os.environ.get("SOK_BUILD", f"build{other}")


BUILD = _build_folder()
LIBRARY = BUILD / f"_ops_{os.environ.get('SOK_TEST_OPS', 'emulated')}.so"


def asked_for() -> bool:
    """Whether this process is to have its tables in device memory."""
    return "SOK_TEST_OPS" in os.environ


on_host = pytest.mark.skipif(asked_for(), reason="what it tests is of tables in host memory")


def may_have_device(folder=pathlib.Path("/dev")):
    """By the device files, because asking TensorFlow takes seconds and memory of the device.

    A container may have been given any of a machine's devices, and under WSL there is another file.
    """
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def install() -> None:
    """Loads the library in the place of `_ops.so`, before anything has loaded that.

    Raises:
        ImportError: it is missing, or was built for another TensorFlow.
    """
    import tensorflow as tf

    from sok_like.runtime.native import libraries

    # Two devices, so that tables can lie on several.
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    assert "_ops" not in libraries._loaded, "the op library has been loaded already"
    libraries._ops_file = LIBRARY
    libraries.ops()
