"""Slices of whole tables: those that ranks hold, that files contain, and that calls read or write.

whole    0 1 2 3 4 5     rows 1 to 4 and rows 3 to 6 have rows 3 and 4 in common: of an array
held       1 2 3 4       of the first they are rows 2 and 3, of the second rows 0 and 1
in a file      3 4 5
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class TableSlice(NamedTuple):
    """A slice of a whole table, or of another variable, along each axis."""

    begin: tuple[int, ...]
    end: tuple[int, ...]  # exclusive

    @property
    def shape(self) -> tuple[int, ...]:
        """Its length along each axis."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in the whole."""
        return tuple(map(slice, self.begin, self.end))

    def common(self, other: TableSlice) -> TableSlice:
        """What both contain, of size 0 if it is nothing."""
        begin = tuple(map(max, self.begin, other.begin))
        return TableSlice(begin, tuple(map(max, begin, map(min, self.end, other.end))))

    def slices_in(self, other: TableSlice) -> tuple[slice, ...]:
        """Its index in an array of `other`, which contains it."""
        origin = other.begin
        return tuple(slice(b - o, e - o) for b, e, o in zip(*self, origin, strict=True))

    def rows(self, begin: int, end: int) -> TableSlice:
        """The same columns of rows `begin` to `end`."""
        return TableSlice((begin, *self.begin[1:]), (end, *self.end[1:]))

    def by_rows(self, num_rows: int) -> Iterator[TableSlice]:
        """Parts of at most so many rows; the bounds of all slices of a table are the same."""
        begin = self.begin[0]
        while begin < self.end[0]:
            end = min(self.end[0], (begin // num_rows + 1) * num_rows)
            yield self.rows(begin, end)
            begin = end


class HeldSlice(NamedTuple):
    """A slice that this rank holds as rows of a variable."""

    place: TableSlice
    variable: Any
    first_row: int  # in the variable

    def read(self, rows: TableSlice) -> tf.Tensor:
        """Some of its rows, without a copy of the others."""
        return tf.gather(self.variable, self._numbers(rows))

    def write(self, rows: TableSlice, values: Any) -> None:
        """Sets some of its rows."""
        tf.raw_ops.ResourceScatterUpdate(
            resource=self.variable.handle,
            indices=self._numbers(rows),
            updates=tf.cast(values, self.variable.dtype),
        )

    def _numbers(self, rows):
        offset = self.first_row - self.place.begin[0]
        return tf.range(rows.begin[0] + offset, rows.end[0] + offset, dtype=tf.int64)
