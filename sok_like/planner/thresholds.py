"""Decides by size which tables are replicated, column-wise or row-wise.

Sizes are numbers of elements, `input_dim * output_dim`, not bytes:

    size <= data_parallel_threshold    replicated on every rank      (checked first)
    size >= row_slice_threshold        row-wise over all ranks
    otherwise                          column-wise

If the two thresholds overlap, a table within both is replicated. On one rank all tables are
column-wise, and whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sok_like.planner.tables import COLUMN_WISE, DATA_PARALLEL, ROW_WISE
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


def group_inputs(
    table_groups: Sequence[Sequence[int]], input_table_map: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Groups the inputs by the group of their table.

    Returns:
        The inputs of each group, in order; for each of them its table's position in the group; and
        the position of each input in the concatenated groups, which undoes the grouping.
    """
    place = {
        table: (group, i)
        for group, tables in enumerate(table_groups)
        for i, table in enumerate(tables)
    }
    input_groups: list[list[int]] = [[] for _ in table_groups]
    map_groups: list[list[int]] = [[] for _ in table_groups]
    for i, table in enumerate(input_table_map):
        if table not in place:
            raise ValueError(
                "Wrong input initializing input/map groups: every entry of `input_table_map` must "
                f"be a table of `table_groups`. Received: input_table_map[{i}]={table!r}"
            )
        group, position = place[table]
        input_groups[group].append(i)
        map_groups[group].append(position)
    return input_groups, map_groups, inverse([i for group in input_groups for i in group])


def inverse(order: Sequence[int]) -> list[int]:
    """Positions that put `order` in ascending order; equal entries keep their order."""
    return sorted(range(len(order)), key=order.__getitem__)
