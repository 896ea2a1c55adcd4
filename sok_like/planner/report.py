"""Prints a plan: what each rank holds, and what a training step sends between ranks.

Counted per rank and step (`B` samples per rank, hotness `h`, `N` ranks), as upper bounds:

    column-wise    a rank receives the keys of all other ranks, (N - 1) * B * h per input, and
                   sends back their rows: one per sample with a combiner, otherwise one per key
    row-wise       keys are assumed to be uniform over rows: the rank receives the shard's share of
                   all keys of other ranks and sends one row for each, fewer if keys repeat
    hash table     as row-wise; the shard's share of all keys is 1 / N
    data-parallel  no keys; the gradients of the rank's B * h rows, with their keys, to N - 1 ranks

Gradients travel back like the rows. For a hash table the report shows its keys in place of its
rows, and the bytes of a full table; without a capacity it shows "grows" and counts no bytes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from sok_like.planner.tables import COLUMN_WISE, DATA_PARALLEL, HASHED, KINDS, Plan, Shard
from sok_like.runtime.checks import check_integer, require

_HEADINGS = ("rank", "table", "kind", "rows", "columns", "bytes", "keys/step", "bytes/step")


class Step(NamedTuple):
    """A training step, as `DistEmbeddingStrategy.report` describes it."""

    local_batch: int
    hotness: Sequence[int]
    slots_per_row: int
    element_bytes: int
    key_bytes: int


def shard_traffic(plan: Plan, shard: Shard, step: Step) -> tuple[int, int]:
    """Keys and bytes that a step sends for one shard; see the docstring of this module."""
    others = plan.world_size - 1
    table = plan.tables[shard.table_id]
    row_bytes = shard.num_columns * step.element_bytes
    combined = table.config.get("combiner") is not None
    num_keys = num_bytes = 0
    for table_id, keys_per_sample in zip(plan.input_table_map, step.hotness, strict=True):
        if table_id != shard.table_id:
            continue
        keys = others * step.local_batch * keys_per_sample
        if shard.kind == DATA_PARALLEL:
            num_bytes += keys * (row_bytes + step.key_bytes)
            continue
        if shard.kind == COLUMN_WISE:
            rows = others * step.local_batch if combined else keys
        elif shard.kind == HASHED:
            keys = rows = -(-keys // plan.world_size)
        else:
            keys = rows = -(-keys * shard.num_rows // table.input_dim)
        # Rows forward, their gradients back.
        num_bytes += keys * step.key_bytes + 2 * rows * row_bytes
        num_keys += keys
    return num_keys, num_bytes


def format_report(plan: Plan, step: Step) -> str:
    """See `DistEmbeddingStrategy.report`; `step.hotness` may be one number for all inputs."""
    num_inputs, hotness = len(plan.input_table_map), step.hotness
    by_input = list(hotness) if isinstance(hotness, Sequence) else [hotness] * num_inputs
    required = f"one integer or one per input ({num_inputs} of them)"
    require(len(by_input) == num_inputs, "hotness", required, hotness)
    step = step._replace(hotness=by_input)
    numbers = {**step._asdict(), **{f"hotness[{i}]": value for i, value in enumerate(by_input)}}
    del numbers["hotness"]
    for argument, value in numbers.items():
        check_integer(argument, value, 0)
    lines: list[tuple] = []
    totals = []
    for rank in range(plan.world_size):
        sums = [0, 0, 0]
        shards = plan.shards_on(rank)
        for shard in shards:
            table = plan.tables[shard.table_id]
            name = table.config.get("name") or f"table {table.table_id}"
            num_rows, rows = shard.num_rows, f"{shard.row_start}:{shard.row_stop}"
            if shard.kind == HASHED:
                num_rows = table.config.get("capacity") or 0
                rows = f"{rank} mod {plan.world_size}"
            columns = f"{shard.column_start}:{shard.column_stop}"
            num_bytes = num_rows * shard.num_columns * (1 + step.slots_per_row) * step.element_bytes
            size = "grows" if shard.kind == HASHED and not num_rows else num_bytes
            of_step = shard_traffic(plan, shard, step)
            lines.append((rank, name, KINDS[shard.kind], rows, columns, size, *of_step))
            sums = [total + n for total, n in zip(sums, (num_bytes, *of_step), strict=True)]
        lines.append((rank, "all" if shards else "idle", "", "", "", *sums))
        totals.append(sums[0])
    mean = sum(totals) / plan.world_size
    largest = max(totals) / mean if mean else 1.0
    cells = [[f"{c:,}" if isinstance(c, int) else c for c in line] for line in lines]
    text = aligned([_HEADINGS, *cells], left={1, 2})  # names; the rest are numbers
    return "\n".join([*text, f"largest rank {max(totals):,} bytes, {largest:.2f} of the mean"])


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """One line per row; cells are aligned to the right, those of the columns `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
