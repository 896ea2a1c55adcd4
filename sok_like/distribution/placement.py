"""Which shard of a variable a rank holds, from the variable's shape, its layout and the mesh.

    shape (10, 4), layout ('model', None), 'model' of 4 ranks

    index 0: rows 0 1 2    1: rows 3 4 5    2: rows 6 7    3: rows 8 9

If a dimension is not divisible by the length of its axis, the first ranks hold one more. If it is
shorter than the axis, the last ranks hold none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dimension sharded along a mesh axis."""

    dim: int
    axis: str  # of the mesh
    length: int  # of the whole dimension
    num_shards: int  # ranks along the axis
    index: int  # this rank's index along the axis

    def bounds(self, index: int | None = None) -> tuple[int, int]:
        """Start and stop of a shard, this rank's by default."""
        return shard_bounds(self.length, self.num_shards, self.index if index is None else index)


def shard_bounds(length: Any, num_shards: int, index: int) -> tuple[Any, Any]:
    """Start and stop of shard number `index`; the first `length % num_shards` have one more.

    `length` may be a tensor.
    """
    size, longer = length // num_shards, length % num_shards
    if isinstance(length, int):
        return index * size + min(index, longer), (index + 1) * size + min(index + 1, longer)
    import tensorflow as tf

    start, stop = (
        i * size + tf.minimum(tf.cast(i, size.dtype), longer) for i in (index, index + 1)
    )
    return start, stop


class Placement:
    """How a variable is sharded over a mesh, and which shard this rank has.

    Args:
        global_shape: Shape of the whole variable.
        axes: One mesh axis or None per dimension.
        sizes, indices: Length of each mesh axis, and this rank's index along it, by axis name.

    Attributes:
        cuts: A `Cut` for each dimension that is sharded over more than one rank.
        local_shape: Shape of this rank's shard.

    Raises:
        ValueError: `axes` does not have one item per dimension, names an axis twice, or names one
            that the mesh does not have.
    """

    def __init__(
        self,
        path: str,
        global_shape: Sequence[int],
        axes: Sequence[str | None],
        sizes: Mapping[str, int],
        indices: Mapping[str, int],
    ):
        self.path, self.axes = path, tuple(axes)
        self.global_shape = tuple(int(length) for length in global_shape)
        named = [axis for axis in self.axes if axis is not None]
        wrong = None
        if len(self.axes) != len(self.global_shape):
            wrong = "must have an item for each dimension"
        elif len(set(named)) < len(named):
            wrong = f"must name an axis once; it names '{max(named, key=named.count)}' twice"
        elif not set(named) <= set(sizes):
            unknown = next(axis for axis in named if axis not in sizes)
            wrong = f"must name axes of the mesh, {tuple(sizes)}; '{unknown}' is not one of them"
        if wrong:
            raise ValueError(
                f"The layout of a variable {wrong}. Received: layout {self.axes} for '{path}' of "
                f"shape {self.global_shape}"
            )
        self.cuts = tuple(
            Cut(dim, axis, length, sizes[axis], indices[axis])
            for dim, (axis, length) in enumerate(zip(self.axes, self.global_shape, strict=True))
            if axis is not None and sizes[axis] > 1
        )
        self.slices = [slice(None)] * len(self.axes)
        for cut in self.cuts:
            self.slices[cut.dim] = slice(*cut.bounds())
        self.local_shape = tuple(
            len(range(*s.indices(length)))
            for s, length in zip(self.slices, self.global_shape, strict=True)
        )

    def take(self, whole: Any) -> Any:
        """This rank's shard of an array or tensor of the global shape."""
        return whole[tuple(self.slices)] if self.cuts else whole
