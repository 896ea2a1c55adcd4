"""Joins the tables of a rank along their rows, so that one gather serves several.

    table a [3, 8]   rows 0..2 of the joined table      row offset 0
    table b [5, 8]   rows 3..7                          row offset 3     key of b + 3

Tables are joined if they have the same class and the same settings, apart from the number of rows,
the name and the initializer. Each keeps its own initializer. A table with a constraint is never
joined, because a constraint may read whole columns (as MaxNorm does by default). Neither is a table
with a regularizer that is not a sum over elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sok_like.planner import readers

# Settings in which joined tables may differ.
_OWN = ("input_dim", "name", "embeddings_initializer", "input_length", "batch_input_shape")


def may_join(config: Mapping[str, Any]) -> bool:
    """Whether a table may be joined with others at all."""
    if config.get("embeddings_constraint") is not None:
        return False
    return not readers.whole_axes(config.get("embeddings_regularizer"))


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must agree between joined tables; None counts as absent."""
    return {key: value for key, value in config.items() if key not in _OWN and value is not None}


def group_tables(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Positions of the tables to join; groups are in the order of their first tables."""
    groups: list[list[int]] = []
    group_settings: list[dict[str, Any] | None] = []
    for i, config in enumerate(configs):
        mine = settings(config) if may_join(config) else None
        if mine is not None and mine in group_settings:
            groups[group_settings.index(mine)].append(i)
        else:
            groups.append([i])
            group_settings.append(mine)
    return groups


def join(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration of several tables joined into one, as a new dictionary.

    If there are several, `embeddings_initializer` is the list of their initializers, each for the
    rows between two `row_offsets`.
    """
    joined = dict(configs[0])
    joined["input_dim"] = sum(config["input_dim"] for config in configs)
    if len(configs) > 1:
        joined["embeddings_initializer"] = [c.get("embeddings_initializer") for c in configs]
        if "name" in joined:
            joined["name"] = f"{joined['name']}_and_{len(configs) - 1}_more"
    return joined


def join_tables(
    configs: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]]]:
    """Joins a rank's tables where their settings agree.

    Returns:
        Configurations of the layers; the positions of each layer's tables; their row offsets.
    """
    groups = group_tables(configs)
    members = [[configs[i] for i in group] for group in groups]
    return [join(tables) for tables in members], groups, [row_offsets(t) for t in members]


def locate(
    groups: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]
) -> dict[int, tuple[int, int]]:
    """The layer and the row offset of each table, from two results of `join_tables`."""
    return {
        table: (layer, offsets[layer][i])
        for layer, group in enumerate(groups)
        for i, table in enumerate(group)
    }


def row_offsets(configs: Sequence[Mapping[str, Any]]) -> list[int]:
    """First row of each table in the joined one, then the total number of rows."""
    offsets = [0]
    for config in configs:
        offsets.append(offsets[-1] + config["input_dim"])
    return offsets
