"""Ranks as a mesh: Keras' `DeviceMesh`, `TensorLayout` and `LayoutMap`, with ranks as devices.

    devices  [[0 1 2 3]      rank 6: index 1 of 2 along 'batch', index 2 of 4 along 'model';
              [4 5 6 7]]     its line along 'model' is 4 5 6 7, along 'batch' 2 6

A dimension of a variable is cut along an axis of the mesh. If the number of ranks does not divide
its length, the first ranks hold one more. If it is shorter than the axis, the last ranks hold none:

    10 rows along 'model':  index 0: rows 0 1 2    1: rows 3 4 5    2: rows 6 7    3: rows 8 9

The classes of Keras 3, under tf_keras too, hold names and numbers, no tensors. `Shard` says which
part of a variable this rank has, and gathers the whole.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from sok_like.distribution.collectives import gather
from sok_like.planner.placement import even_part
from sok_like.runtime.checks import require, unmet, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.slices import TableSlice

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
        ValueError: when a layout is set, if its key exists already, it is not a tuple or
            TensorLayout, or it names an axis that the mesh does not have; when a layout is read, if
            several keys match the path.
    """

    def __setitem__(self, key: str, layout: Any) -> None:
        """Sets the layout of the variables that match `key`."""
        axes = layout if isinstance(layout, tuple) else getattr(layout, "axes", ())
        for axis in axes:
            if self.device_mesh is not None and axis not in (None, *self.device_mesh.axis_names):
                required = f"name axes of the mesh, {tuple(self.device_mesh.axis_names)}, or None"
                received = f"axis {axis!r} in the layout {tuple(axes)} for the key {key!r}"
                raise unmet("A layout", required, received)
        super().__setitem__(key, layout)


class RankMesh:
    """This rank's `index` in a DeviceMesh by axis, and communicators; every rank must make it."""

    def __init__(self, device_mesh: Any):
        names, sizes = list(device_mesh.axis_names), [int(size) for size in device_mesh.shape]
        # 3 for 3, "cpu:3" or "/device:GPU:3"; anything else is no rank, and stays as it is.
        devices = list(np.asarray(device_mesh.devices).reshape(-1))
        numbers = [str(device).rsplit(":", 1)[-1] for device in devices]
        ranks = [int(n) if n.isdigit() else d for n, d in zip(numbers, devices, strict=True)]
        world_size = comm.launched_world_size()
        if ranks != list(range(world_size)):
            raise ValueError(
                "A mesh must contain the device of every rank of the job, in the order of "
                f"list_devices(). Received: a mesh of shape {tuple(sizes)} with axes "
                f"{tuple(names)} over {math.prod(sizes)} devices, of ranks {ranks}, in a job of "
                f"{world_size} rank(s)"
            )
        if not comm.is_initialized():
            # One engine accepts groups of ranks only if it was told at its start. A later mesh may
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


rank_mesh = functools.cache(RankMesh)  # that of a DeviceMesh is made once


class Cut(NamedTuple):
    """A dimension sharded along a mesh axis."""

    dim: int
    axis: str  # of the mesh
    length: int  # of the whole dimension


class Shard:
    """How a variable is sharded over a mesh, and which shard this rank has.

    `layout` has one mesh axis or None per dimension; `cuts` has a `Cut` for each dimension that is
    sharded over more than one rank.
    """

    key: str | None = None  # by which its gradients refer to it, from the first one on

    def __init__(
        self,
        path: str,
        global_shape: Sequence[int],
        layout: Sequence[str | None],
        mesh: RankMesh,
        batch_axis: str | None = None,
    ):
        self.path, self.layout, self.mesh, self.batch_axis = path, tuple(layout), mesh, batch_axis
        self.global_shape = tuple(int(length) for length in global_shape)
        sizes, named = mesh.shape, [axis for axis in self.layout if axis is not None]
        wrong = None
        if len(self.layout) != len(self.global_shape):
            wrong = "must have an item for each dimension"
        elif len(set(named)) < len(named):
            wrong = f"must name an axis once; it names '{max(named, key=named.count)}' twice"
        elif not set(named) <= set(sizes):
            unknown = next(axis for axis in named if axis not in sizes)
            wrong = f"must name axes of the mesh, {tuple(sizes)}; '{unknown}' is not one of them"
        if wrong:
            raise ValueError(
                f"The layout of a variable {wrong}. Received: layout {self.layout} for '{path}' of "
                f"shape {self.global_shape}"
            )
        bounds, self.cuts = [(0, length) for length in self.global_shape], []
        for dim, (axis, length) in enumerate(zip(self.layout, self.global_shape, strict=True)):
            if axis is not None and sizes[axis] > 1:
                bounds[dim] = even_part(length, mesh.index[axis], sizes[axis])
                self.cuts.append(Cut(dim, axis, length))
        self.axes = tuple(cut.axis for cut in self.cuts)
        self.over_batch = batch_axis in self.axes  # then reading it reduces its gradient
        self.place = TableSlice(tuple(b for b, _ in bounds), tuple(e for _, e in bounds))
        self.local_shape = self.place.shape

    def take(self, whole: Any) -> Any:
        """This rank's shard of an array or tensor of the global shape."""
        return whole[self.place.slices] if self.cuts else whole

    def whole(self, local: tf.Tensor) -> tf.Tensor:
        """Gathers the whole value from the ranks; its gradient goes back to the shards."""
        for cut in self.cuts:
            line, name = self.mesh.along(cut.axis), f"{self.path}_dim{cut.dim}"
            gradient = "mean" if cut.axis == self.batch_axis else 1.0
            local = gather(local, cut.dim, line, name, gradient)
        return tf.ensure_shape(local, self.global_shape)


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Meets the other ranks. Only needed before `sok.Init`, on Horovod, if a mesh has two axes.

    The launcher (mpirun, horovodrun) has started and connected the processes, so the arguments of
    Keras' function are only checked.

    Args:
        job_addresses: Ignored.
        num_processes: The number of ranks, or None.
        process_id: This rank, or None.

    Raises:
        ValueError: `num_processes` or `process_id` differs from the launched job.
    """
    ensure_initialized(groups_later=True)
    communicator = comm.current()
    for name, given, real in (
        ("num_processes", num_processes, communicator.world_size),
        ("process_id", process_id, communicator.rank),
    ):
        required = f"that of the launched job, {real}"
        require(given is None or given == real, name, required, given)


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """This rank's shard of a tensor that all ranks hold whole.

    Args:
        tensor: A tensor or array of any shape; a symbolic Keras tensor is returned unchanged.
        layout: `TensorLayout` with a mesh. Each axis that it names is divided by the ranks along
            that axis of the mesh.

    Raises:
        ValueError: the layout has no mesh or does not fit the tensor.
    """
    if isinstance(tensor, keras.KerasTensor):
        return tensor
    if layout.device_mesh is None:
        raise ValueError(f"`layout` must have a device mesh. Received: layout={layout!r}")
    tensor, mesh = tf.convert_to_tensor(tensor), rank_mesh(layout.device_mesh)
    return Shard("tensor", tensor.shape, layout.axes, mesh).take(tensor)
