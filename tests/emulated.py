"""The op library whose kernels for device tables run on emulated devices, in host memory.

`SOK_TEST_OPS=emulated pytest tests/...` runs tests over it, in this process and in the ranks it
starts: the same tests, with every table in "device memory" (cpp/tests/emulator). It comes with the
C++ tests, and takes the place of `_ops.so`: a process can register an op but once.
"""

import os
import pathlib

# Where the C++ was compiled: `make` sets SOK_BUILD where TF= chooses another TensorFlow.
BUILD = pathlib.Path(__file__).resolve().parent.parent / os.environ.get("SOK_BUILD", "build")
LIBRARY = BUILD / "_ops_emulated.so"


def asked_for() -> bool:
    """Whether this process is to run over emulated devices."""
    return os.environ.get("SOK_TEST_OPS") == "emulated"


def install() -> None:
    """Loads the library in the place of `_ops.so`, before anything has loaded that."""
    import tensorflow as tf

    from sok_like.runtime import native

    assert "_ops" not in native._loaded, "the op library has been loaded already"
    native._ops_file = LIBRARY
    native._loaded["_ops"] = tf.load_op_library(str(LIBRARY))
