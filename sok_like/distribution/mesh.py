"""Ranks as a mesh: Keras' `DeviceMesh`, `TensorLayout` and `LayoutMap`, with ranks as devices.

    devices  [[0 1 2 3]      rank 6: index 1 of 2 along 'batch', index 2 of 4 along 'model';
              [4 5 6 7]]     its line along 'model' is 4 5 6 7, along 'batch' 2 6

The classes are those of Keras 3, under tf_keras too: they hold names and numbers, no tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.initialize import ensure_initialized

TensorLayout = keras.distribution.TensorLayout


def list_devices(device_type: str | None = None) -> list[str]:
    """The devices of the job, one per rank: `["cpu:0", "cpu:1", ...]`, or "gpu:..." with GPUs.

    Args:
        device_type: "cpu" or "gpu"; None: the type that this rank has.

    Raises:
        ValueError: `device_type` is another value.
    """
    if device_type is None:
        device_type = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    if str(device_type).lower() not in ("cpu", "gpu"):
        raise wrong_argument("device_type", '"cpu", "gpu" or None', device_type)
    return [f"{device_type.lower()}:{rank}" for rank in range(comm.launched_world_size())]


def get_device_count(device_type: str | None = None) -> int:
    """The number of devices of the job, one per rank.

    Args:
        device_type: As in `list_devices`.

    Raises:
        ValueError: as there.
    """
    return len(list_devices(device_type))


class DeviceMesh(keras.distribution.DeviceMesh):
    """Keras' DeviceMesh, by default over the ranks of the job.

    Args:
        shape: Ranks along each axis.
        axis_names: One name per axis.
        devices: The result of `list_devices()`, in its order, which is also the default.

    Raises:
        ValueError: `shape` and `axis_names` are empty or differ in length, or the product of
            `shape` is not the number of devices.
    """

    def __init__(
        self, shape: Sequence[int], axis_names: Sequence[str], devices: Sequence | None = None
    ):
        super().__init__(shape, axis_names, list_devices() if devices is None else devices)


class LayoutMap(keras.distribution.LayoutMap):
    """Keras' LayoutMap, which also checks the axes of its layouts.

    A key equal to the path of a variable has priority. Otherwise keys are regular expressions, and
    match as those of the installed Keras do: the whole path since Keras 3.14, a part of it before.

    Args:
        device_mesh: The DeviceMesh of layouts that are given as tuples, or None.

    Raises:
        ValueError: when a layout is set, see the method; or read, if several keys match the path.
    """

    def __setitem__(self, key: str, layout: Any) -> None:
        """Sets the layout of the variables that match `key`.

        Raises:
            ValueError: the key exists already, the layout is not a tuple or TensorLayout, or it
                names an axis that the mesh does not have.
        """
        axes = layout if isinstance(layout, tuple) else getattr(layout, "axes", ())
        for axis in axes:
            if self.device_mesh is not None and axis not in (None, *self.device_mesh.axis_names):
                raise ValueError(
                    "A layout must name axes of the mesh, "
                    f"{tuple(self.device_mesh.axis_names)}, or None. Received: axis {axis!r} in "
                    f"the layout {tuple(axes)} for the key {key!r}"
                )
        super().__setitem__(key, layout)


class RankMesh:
    """This rank's position in a DeviceMesh, and the communicators along its axes.

    Args:
        device_mesh: A DeviceMesh, Keras' or ours. Every rank must create this object.

    Attributes:
        shape: Ranks along each axis, by name.
        index: This rank's index along each axis, by name.

    Raises:
        ValueError: the devices of the mesh are not those of all ranks, in order.
        RuntimeError: the mesh needs groups of ranks, for which Horovod was not initialised.
    """

    def __init__(self, device_mesh: Any):
        names, sizes = list(device_mesh.axis_names), [int(size) for size in device_mesh.shape]
        ranks = [_rank_of(device) for device in np.asarray(device_mesh.devices).reshape(-1)]
        world_size = comm.launched_world_size()
        if ranks != list(range(world_size)):
            raise ValueError(
                "A mesh must contain the device of every rank of the job, in the order of "
                f"list_devices(). Received: a mesh of shape {tuple(sizes)} with axes "
                f"{tuple(names)} over {math.prod(sizes)} devices, of ranks {ranks}, in a job of "
                f"{world_size} rank(s)"
            )
        if not comm.is_initialized():
            # Horovod accepts groups of ranks only if it was told at its start. A later mesh may
            # have two axes if four ranks can be a grid.
            ensure_initialized(groups_later=world_size > 3)
        self.device_mesh = device_mesh
        self.shape = dict(zip(names, sizes, strict=True))
        grid = np.arange(world_size).reshape(sizes)
        place = [int(i) for i in np.argwhere(grid == comm.current().rank)[0]]
        self.index = dict(zip(names, place, strict=True))
        self._communicators = {}
        for axis, name in enumerate(names):
            lines = np.moveaxis(grid, axis, -1).reshape(-1, sizes[axis])
            self._communicators[name] = comm.current().subset(lines.tolist())

    def along(self, axis_name: str) -> comm.Communicator:
        """The communicator of the ranks that differ from this one in one axis only."""
        return self._communicators[axis_name]


@functools.cache
def rank_mesh(device_mesh: Any) -> RankMesh:
    """The RankMesh of a DeviceMesh; made once."""
    return RankMesh(device_mesh)


def _rank_of(device):
    """3 for 3, "cpu:3" or "/device:GPU:3"; otherwise the device itself, which is not a rank."""
    number = str(device).rsplit(":", 1)[-1]
    return int(number) if number.isdigit() else device
