"""Which part of a variable a rank holds: a pure function of its shape, its layout and the mesh.

    shape (10, 4), layout ('model', None), 'model' of 4 ranks

    index 0: rows 0 1 2    1: rows 3 4 5    2: rows 6 7    3: rows 8 9

A dimension that its axis does not divide is cut unevenly: the first ranks hold one more. One that
is shorter than its axis leaves the last ranks with none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dimension spread over a mesh axis.

    Attributes:
        dim: The dimension.
        axis: The mesh axis.
        length: Of the whole dimension.
        parts: Ranks along the axis.
        index: This rank's.
    """

    dim: int
    axis: str
    length: int
    parts: int
    index: int

    def bounds(self, index: int | None = None) -> tuple[int, int]:
        """Start and stop of a part, this rank's by default."""
        return part(self.length, self.parts, self.index if index is None else index)


def part(length: Any, parts: int, index: int) -> tuple[Any, Any]:
    """Start and stop of part `index` of `parts`; the first `length % parts` are one longer.

    `length` may be a tensor.
    """
    size, longer = length // parts, length % parts
    if isinstance(length, int):
        return index * size + min(index, longer), (index + 1) * size + min(index + 1, longer)
    import tensorflow as tf

    start, stop = (
        i * size + tf.minimum(tf.cast(i, size.dtype), longer) for i in (index, index + 1)
    )
    return start, stop


class Placement:
    """Where a variable lies: replicated but along its cuts.

    Args:
        path: Of the variable, for errors.
        global_shape: Of the whole variable.
        axes: A mesh axis or None for each dimension.
        sizes, indices: Of the mesh and of this rank in it, by axis.

    Attributes:
        cuts: A `Cut` for each dimension that is spread over more than one rank.
        local_shape: Of this rank's shard.

    Raises:
        ValueError: `axes` has not an item a dimension, names an axis twice, or one that is not in
            the mesh.
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
            wrong = f"must name axes of the mesh, {tuple(sizes)}; '{unknown}' is none"
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
        """This rank's part of an array or tensor of the global shape."""
        return whole[tuple(self.slices)] if self.cuts else whole
