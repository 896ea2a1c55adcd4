"""How many slices a column-wise table is cut into along its width.

A table with more elements than the threshold is cut into the smallest power of two of slices that
makes a slice, `size / slices`, no larger than it; but into no more slices than there are ranks or
columns. The first `output_dim % slices` of them are one column wider.
"""

from __future__ import annotations

from collections.abc import Sequence

from sok_like.planner.tables import TableConfig


def num_slices(table: TableConfig, threshold: int | None, world_size: int) -> int:
    """Number of slices of a table; None cuts nothing."""
    if threshold is None or table.size <= threshold:
        return 1
    # ceil(size / threshold), rounded up to a power of two, without a loop that could fail to end.
    needed = -(-table.size // threshold)
    return min(1 << (needed - 1).bit_length(), world_size, table.output_dim)


def slice_widths(output_dim: int, slices: int) -> list[int]:
    """Columns of each slice."""
    narrow, wider = divmod(output_dim, slices)
    return [narrow + 1] * wider + [narrow] * (slices - wider)


def automatic_threshold(tables: Sequence[TableConfig], world_size: int) -> int | None:
    """The threshold that gives every rank a slice, as far as the tables' widths allow; or None.

    With as many tables as ranks nothing is cut. Else the largest piece is halved until there are as
    many pieces as ranks, and the threshold is one less than the last piece that was halved. That
    ignores widths, so while ranks are left over, the table with the largest slice of those that can
    still be cut is cut once more. Tables narrower than that leave ranks idle.
    """
    if not tables or len(tables) >= world_size:
        return None
    threshold = _halving_threshold([table.size for table in tables], world_size)
    while True:
        counts = [num_slices(table, threshold, world_size) for table in tables]
        if sum(counts) >= world_size:
            return threshold
        # Below its limit a count is that power of two, so the next threshold doubles it. It falls
        # with each turn and stays >= 1, as a table has more elements than slices.
        smaller = [
            (table.size - 1) // count
            for table, count in zip(tables, counts, strict=True)
            if count < min(world_size, table.output_dim)
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
