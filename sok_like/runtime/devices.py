"""Where a table is, in host memory or on a GPU, and what follows for the ops around it.

TensorFlow puts a table where it puts the op that makes it: on the GPU the process sees, where the
op library was built with CUDA, or where a `tf.device` scope says. Every op that takes the handle
goes there too. What this module adds: the ops of a lookup that take no handle stay beside its
tables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from sok_like.runtime import native


def gpu_in_use() -> bool:
    """Whether tables of this process may be on a GPU."""
    return bool(tf.config.get_visible_devices("GPU")) and _library_has_gpu_kernels()


@functools.cache
def _library_has_gpu_kernels():
    native.ops()  # registers them
    return "GPU" in kernel_devices("SokTableHandle")


def kernel_devices(op: str) -> set[str]:
    """Kinds of device that the loaded libraries have a kernel of `op` for: "CPU", "GPU"."""
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}


def device_scope(device: str) -> Any:
    """The scope of ops that work on what a table on `device` gives or takes.

    Left to itself TensorFlow would send them to the GPU, and all they read and write with them.
    Collectives stay outside: Horovod may have no kernel there. Nothing without a GPU, so that
    graphs name devices only where there is a choice.
    """
    if not device or not gpu_in_use():
        return contextlib.nullcontext()
    return tf.device(device)


def group_by_device(devices: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Equal devices together, in order of first appearance, each with its positions."""
    positions: dict[str, list[int]] = {}
    for position, device in enumerate(devices):
        positions.setdefault(device, []).append(position)
    return list(positions.items())
