"""Decides which rank gets which slice.

    basic              slice i to rank i % world_size: equal numbers of slices
    memory_balanced    largest first, ranks in order and then in reverse: equal numbers of slices
                       and balanced sizes
    memory_optimized   largest first, each to the rank with the fewest elements so far: best
                       balance, but ranks may have different numbers of slices

All are pure functions of the slices, without sets, hashes or clocks, so every rank computes the
same result. Slices of equal size are ordered by table, the later table first.
"""

from __future__ import annotations

from collections.abc import Sequence

STRATEGIES = ("basic", "memory_balanced", "memory_optimized")


def check_strategy(strategy: object) -> str:
    """`strategy` itself; ValueError unless it is one of `STRATEGIES`."""
    if isinstance(strategy, str) and strategy in STRATEGIES:
        return strategy
    raise ValueError(
        f"Unsupported shard strategy: `strategy` must be one of {STRATEGIES}. "
        f"Received: strategy={strategy!r}"
    )


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
