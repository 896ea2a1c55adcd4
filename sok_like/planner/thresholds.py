"""Decides by size which tables are replicated, column-wise or row-wise, and how they are sliced.

Sizes are numbers of elements, `input_dim * output_dim`, not bytes:

    size <= data_parallel_threshold    replicated on every rank      (checked first)
    size >= row_slice_threshold        row-wise over all ranks
    otherwise                          column-wise

If the two thresholds overlap, a table within both is replicated. On one rank all tables are
column-wise, and whole.

The number of slices of a column-wise table is the smallest power of two for which a slice,
`size / slices`, is no larger than `column_slice_threshold`, but at most the number of ranks and of
columns. The first `output_dim % slices` slices are one column wider.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sok_like.planner.tables import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TableConfig
from sok_like.runtime.checks import as_integer, wrong_argument


def check_threshold(argument: str, value: Any, minimum: int) -> int | None:
    """The threshold as an int, or None; ValueError unless None or an integer >= `minimum`."""
    if value is None:
        return None
    integer = as_integer(value)
    if integer is None or integer < minimum:
        required = f"None or a number of elements, an integer >= {minimum}"
        raise wrong_argument(argument, required, value)
    return integer


def kind_of(size: int, row_slice_threshold: int | None, data_parallel_threshold: int | None) -> int:
    """The kind of a table of `size` elements on more than one rank."""
    if data_parallel_threshold is not None and size <= data_parallel_threshold:
        return DATA_PARALLEL
    if row_slice_threshold is not None and size >= row_slice_threshold:
        return ROW_WISE
    return COLUMN_WISE


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
    threshold: int | None = None
    sizes = [table.size for table in tables]
    while len(sizes) < world_size and (largest := max(sizes)) > 1:
        threshold = largest - 1
        sizes.remove(largest)
        sizes += [largest // 2, largest // 2]
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


def check_input_table_map(input_table_map: Any, num_tables: int) -> list[int]:
    """The table of each input; None maps input i to table i.

    A table without inputs is legal: it has weights and no output.
    """
    if input_table_map is None:
        return list(range(num_tables))
    if not isinstance(input_table_map, Iterable):
        required = "None or a list of integers, one table per input"
        raise wrong_argument("input_table_map", required, input_table_map, error=TypeError)
    tables = []
    for i, value in enumerate(input_table_map):
        table = as_integer(value)
        if table is None or not 0 <= table < num_tables:
            raise ValueError(
                "Wrong input initializing input/map groups: `input_table_map` must hold integers "
                f"in [0, {num_tables}), the number of tables. "
                f"Received: input_table_map[{i}]={value!r}"
            )
        tables.append(table)
    return tables


def inverse(order: Sequence[int]) -> list[int]:
    """Positions that put `order` in ascending order; equal entries keep their order."""
    return sorted(range(len(order)), key=order.__getitem__)
