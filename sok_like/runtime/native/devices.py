"""Places the ops of a lookup on the device of its tables, in host memory or on a GPU.

TensorFlow places a table like the op that creates it: on the GPU that the process sees, if the op
library was built with CUDA, or where a `tf.device` scope says. All ops that take the table's handle
follow. This module places the ops of a lookup that do not take a handle.
"""

import contextlib
import functools
import warnings
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from sok_like.runtime.native import libraries


def gpu_in_use() -> bool:
    """Whether tables of this process may be on a GPU."""
    return _tensorflow_may_use_gpu() and not _runtime_problem()


def table_scope() -> Any:
    """The device scope in which a table is made."""
    if not _only_tensorflow_can_use_gpu():
        return contextlib.nullcontext()
    # The package's libraries have a CUDA runtime of their own, which may need a newer driver.
    warnings.warn(
        "TensorFlow sees a GPU that the CUDA runtime of sok_like cannot use: "
        f"{_runtime_problem()}. Tables are made in host memory. Install a newer driver, or build "
        "with the nvcc of an older CUDA 12 (docs/install.md).",
        RuntimeWarning,
        stacklevel=3,
    )
    return tf.device("/CPU:0")


def message_scope() -> Any:
    """The device scope of ops on messages between ranks, which have no table to follow."""
    return tf.device("/CPU:0") if _only_tensorflow_can_use_gpu() else contextlib.nullcontext()


def _only_tensorflow_can_use_gpu():
    return _tensorflow_may_use_gpu() and bool(_runtime_problem())


def _tensorflow_may_use_gpu():
    return bool(tf.config.get_visible_devices("GPU")) and _library_has_gpu_kernels()


@functools.cache
def _library_has_gpu_kernels():
    libraries.ops()  # registers them
    return "GPU" in kernel_devices("SokTableHandle")


@functools.cache
def _runtime_problem():
    """Why the libraries' CUDA runtime can use no device; empty where it can."""
    core = libraries.core()
    if core.cuda_device_count() > 0:
        return ""
    try:
        core.cuda_device_info()  # raises the reason
    except RuntimeError as error:
        return str(error)
    return "it finds no device"


def kernel_devices(op: str) -> set[str]:
    """Device types ("CPU", "GPU") for which the loaded libraries have a kernel of `op`."""
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}


def device_scope(device: str) -> Any:
    """The device scope of ops on a table's tensors: else TensorFlow would copy them to the GPU."""
    # Collectives stay outside, because an engine may have no GPU kernel.
    # Graphs name devices only if TensorFlow has a choice, also of a GPU that tables cannot use.
    usable = device and _tensorflow_may_use_gpu()
    return tf.device(device) if usable else contextlib.nullcontext()
