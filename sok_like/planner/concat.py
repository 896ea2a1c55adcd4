"""Joins the tables of a rank along their rows, so that one gather serves several.

    table a [3, 8]   rows 0..2 of the joined table      row offset 0
    table b [5, 8]   rows 3..7                          row offset 3     key of b + 3

Tables are joined if they have the same class and the same settings, apart from the number of rows,
the name and the initializer. Each keeps its own initializer. A table with a constraint is never
joined, because a constraint may read whole columns (as MaxNorm does by default). Neither is a table
with a regularizer that is not a sum over elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sok_like.planner import readers

# Settings in which joined tables may differ.
_OWN = ("input_dim", "name", "embeddings_initializer", "input_length", "batch_input_shape")


def join_tables(
    configs: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]]]:
    """Joins a rank's tables where their settings agree.

    Returns:
        Configurations of the layers, in the order of their first tables; the positions of each
        layer's tables; their first rows in the layer, then the layer's number of rows.
    """
    groups: list[list[int]] = []
    group_settings: list[dict[str, Any] | None] = []
    for i, config in enumerate(configs):
        settings = _settings(config)
        if settings is not None and settings in group_settings:
            groups[group_settings.index(settings)].append(i)
        else:
            groups.append([i])
            group_settings.append(settings)
    members = [[configs[i] for i in group] for group in groups]
    offsets = [[0, *itertools.accumulate(t["input_dim"] for t in tables)] for tables in members]
    return [_join(tables) for tables in members], groups, offsets


def _settings(config):
    """The settings that must agree between joined tables; None for a table that is not joined."""
    is_additive = not readers.whole_axes(config.get("embeddings_regularizer"))
    if config.get("embeddings_constraint") is not None or not is_additive:
        return None
    return {key: value for key, value in config.items() if key not in _OWN and value is not None}


def _join(configs):
    """The configuration of one layer; of several tables it has the list of their initializers."""
    joined = dict(configs[0])
    joined["input_dim"] = sum(config["input_dim"] for config in configs)
    if len(configs) > 1:
        joined["embeddings_initializer"] = [c.get("embeddings_initializer") for c in configs]
        if "name" in joined:
            joined["name"] = f"{joined['name']}_and_{len(configs) - 1}_more"
    return joined
