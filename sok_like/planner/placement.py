"""From the sizes of tables to the layers of each rank: kinds, slices, ranks, joined tables.

Sizes are numbers of elements, `input_dim * output_dim`, not bytes:

    size <= data_parallel_threshold    replicated on every rank      (checked first)
    size >= row_slice_threshold        row-wise over all ranks
    otherwise                          column-wise

If the two thresholds overlap, a table within both is replicated. On one rank all tables are
column-wise, and whole.

The number of slices of a column-wise table is the smallest power of two for which a slice,
`size / slices`, is no larger than `column_slice_threshold`, but at most the number of ranks and of
columns. The first `output_dim % slices` slices are one column wider. Slices go to ranks:

    basic              slice i to rank i % world_size: equal numbers of slices
    memory_balanced    largest first, ranks in order and then in reverse: equal numbers of slices
                       and balanced sizes
    memory_optimized   largest first, each to the rank with the fewest elements so far: best
                       balance, but ranks may have different numbers of slices

Slices of equal size are ordered by table, the later table first. All are pure functions, without
sets, hashes or clocks, so every rank computes the same result.

Tables of a rank with the same class and settings are joined along their rows, so that one gather
serves several. A table with a constraint, or a regularizer that is no sum over elements, is not:

    table a [3, 8]   rows 0..2 of the joined table      row offset 0
    table b [5, 8]   rows 3..7                          row offset 3     key of b + 3
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sok_like.planner.tables import TableConfig, whole_axes
from sok_like.runtime.checks import as_integer, unmet, wrong_argument

STRATEGIES = ("basic", "memory_balanced", "memory_optimized")
# Settings in which joined tables may differ.
_OWN = ("input_dim", "name", "embeddings_initializer", "input_length", "batch_input_shape")


def check_threshold(argument: str, value: Any, minimum: int) -> int | None:
    """The threshold as an int, or None; ValueError unless None or an integer >= `minimum`."""
    integer = as_integer(value)
    if value is not None and (integer is None or integer < minimum):
        required = f"None or a number of elements, an integer >= {minimum}"
        raise wrong_argument(argument, required, value)
    return integer


def num_slices(table: TableConfig, threshold: int | None, world_size: int) -> int:
    """Number of slices of a table; 1 if `threshold` is None."""
    if threshold is None or table.size <= threshold:
        return 1
    # ceil(size / threshold), rounded up to a power of two, without a loop that might not end.
    needed = -(-table.size // threshold)
    return min(1 << (needed - 1).bit_length(), table.most_slices(world_size))


def even_part(length: int, index: int, number: int) -> tuple[int, int]:
    """Start and stop of part `index` of `number`; the first `length % number` have one more."""
    size, longer = divmod(length, number)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def automatic_threshold(tables: Sequence[TableConfig], world_size: int) -> int | None:
    """The threshold that gives every rank a slice, as far as the tables' columns allow, or None."""
    # With at least as many tables as ranks no table is sliced. Otherwise the largest slice is
    # halved until there are as many as ranks; the threshold is one less than the last one halved.
    # That ignores the number of columns, so while ranks have no slice, halving goes on if it can.
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
    """The table of each input; None maps input i to table i. A table may have none."""
    if input_table_map is None:
        return list(range(num_tables))
    if not isinstance(input_table_map, Iterable):
        required = "None or a list of integers, one table per input"
        raise wrong_argument("input_table_map", required, input_table_map, error=TypeError)
    tables = []
    for i, value in enumerate(input_table_map):
        table = as_integer(value)
        if table is None or not 0 <= table < num_tables:
            subject = "Wrong input initializing input/map groups: `input_table_map`"
            required = f"hold integers in [0, {num_tables}), the number of tables"
            raise unmet(subject, required, f"input_table_map[{i}]={value!r}")
        tables.append(table)
    return tables


def check_strategy(strategy: object) -> None:
    """ValueError unless it is one of `STRATEGIES`."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        required = f"be one of {STRATEGIES}"
        raise unmet("Unsupported shard strategy: `strategy`", required, f"strategy={strategy!r}")


def place(
    strategy: str, world_size: int, tables: Sequence[int], sizes: Sequence[int]
) -> list[list[int]]:
    """The slices of each rank, as positions in `tables` and `sizes`, which are in table order."""
    check_strategy(strategy)
    if strategy == "basic":
        return [list(range(rank, len(tables), world_size)) for rank in range(world_size)]
    # sorted() keeps equal slices of one table in their order.
    order = sorted(range(len(tables)), key=lambda i: (-sizes[i], -tables[i]))
    if strategy == "memory_balanced":
        period = 2 * world_size
        return [order[r::period] + order[period - 1 - r :: period] for r in range(world_size)]
    loads = [0] * world_size
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for i in order:
        least = loads.index(min(loads))
        loads[least] += sizes[i]
        ranks[least].append(i)
    return ranks


def join_tables(
    configs: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]]]:
    """Joins a rank's tables whose settings agree: configurations, tables and first rows of each."""
    groups: list[list[int]] = []
    group_settings: list[dict[str, Any] | None] = []
    for i, config in enumerate(configs):
        # A constraint may read whole columns, as MaxNorm does by default.
        is_whole = config.get("embeddings_constraint") is not None
        if is_whole or whole_axes(config.get("embeddings_regularizer")):
            settings = None
        else:
            settings = {k: v for k, v in config.items() if k not in _OWN and v is not None}
        if settings is not None and settings in group_settings:
            groups[group_settings.index(settings)].append(i)
        else:
            groups.append([i])
            group_settings.append(settings)
    layers, offsets = [], []
    for group in groups:
        members = [configs[i] for i in group]
        offsets.append([0, *itertools.accumulate(member["input_dim"] for member in members)])
        layers.append({**members[0], "input_dim": offsets[-1][-1]})
        if len(members) > 1:  # each keeps its own initializer
            initializers = [member.get("embeddings_initializer") for member in members]
            layers[-1]["embeddings_initializer"] = initializers
            if "name" in layers[-1]:
                layers[-1]["name"] = f"{members[0]['name']}_and_{len(members) - 1}_more"
    return layers, groups, offsets
