"""Decides how many slices of columns a column-wise table has.

The number of slices is the smallest power of two for which a slice, `size / slices`, is no larger
than the threshold, but at most the number of ranks and of columns. The first `output_dim % slices`
slices are one column wider.
"""

from __future__ import annotations

from collections.abc import Sequence

from sok_like.planner.tables import TableConfig


def num_slices(table: TableConfig, threshold: int | None, world_size: int) -> int:
    """Number of slices of a table; 1 if `threshold` is None."""
    if threshold is None or table.size <= threshold:
        return 1
    # ceil(size / threshold), rounded up to a power of two, without a loop that might not end.
    needed = -(-table.size // threshold)
    return min(1 << (needed - 1).bit_length(), table.most_slices(world_size))


def slice_widths(output_dim: int, slices: int) -> list[int]:
    """Number of columns of each slice."""
    narrow, wider = divmod(output_dim, slices)
    return [narrow + 1] * wider + [narrow] * (slices - wider)


def automatic_threshold(tables: Sequence[TableConfig], world_size: int) -> int | None:
    """The threshold that gives every rank a slice, as far as the tables' columns allow, or None.

    With at least as many tables as ranks no table is sliced. Otherwise the largest slice is halved
    until there are as many slices as ranks; the threshold is one less than the last slice that was
    halved. That ignores the number of columns. So while ranks have no slice, the table with the
    largest slice that can still be halved is halved again. If no table can be, ranks stay idle.
    """
    if not tables or len(tables) >= world_size:
        return None
    threshold = _halving_threshold([table.size for table in tables], world_size)
    while True:
        counts = [num_slices(table, threshold, world_size) for table in tables]
        if sum(counts) >= world_size:
            return threshold
        # A count below its limit is a power of two, and the next threshold doubles it. The
        # threshold falls in each iteration and stays >= 1: a table has more elements than slices.
        smaller = [
            (table.size - 1) // count
            for table, count in zip(tables, counts, strict=True)
            if count < table.most_slices(world_size)
        ]
        if not smaller:
            return threshold
        threshold = max(smaller)


def _halving_threshold(sizes: list[int], world_size: int) -> int | None:
    threshold = None
    while len(sizes) < world_size:
        largest = max(sizes)
        if largest < 2:
            break
        threshold = largest - 1
        sizes.remove(largest)
        sizes += [largest // 2, largest // 2]
    return threshold
