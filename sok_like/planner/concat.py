"""Joining the tables of a rank along their rows, so that one gather serves several.

    table a [3, 8]   rows 0..2 of the joined table      row offset 0
    table b [5, 8]   rows 3..7                          row offset 3     key of b + 3

Only tables that would behave the same apart from their rows are joined: same class and same
settings throughout, whatever they are called, save the number of rows, the name and the
initializer, which is kept for each. A table under a constraint stays alone, since a constraint may
look at whole columns (as MaxNorm does by default); so does one under a regularizer that is not a
sum over elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Settings in which joined tables may differ.
_OWN = ("input_dim", "name", "embeddings_initializer", "input_length", "batch_input_shape")
_ADDITIVE_REGULARIZERS = ("L1", "L2", "L1L2")


def may_join(config: Mapping[str, Any]) -> bool:
    """Whether a table may be joined with others at all."""
    if config.get("embeddings_constraint") is not None:
        return False
    regularizer = config.get("embeddings_regularizer")
    if isinstance(regularizer, Mapping):
        return regularizer.get("class_name") in _ADDITIVE_REGULARIZERS
    return regularizer is None or type(regularizer).__name__ in _ADDITIVE_REGULARIZERS


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree between joined tables; a setting of None counts as absent."""
    return {key: value for key, value in config.items() if key not in _OWN and value is not None}


def group_tables(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Positions of the tables that go together; a group stands where its first table stood."""
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
    """The configuration of several tables as one.

    A new dictionary. Of more than one table, `embeddings_initializer` is the list of theirs, each
    for the rows between two `row_offsets`; a single table keeps its own.
    """
    joined = dict(configs[0])
    joined["input_dim"] = sum(config["input_dim"] for config in configs)
    if len(configs) > 1:
        joined["embeddings_initializer"] = [c.get("embeddings_initializer") for c in configs]
        if "name" in joined:
            joined["name"] = f"{joined['name']}_and_{len(configs) - 1}_more"
    return joined


def row_offsets(configs: Sequence[Mapping[str, Any]]) -> list[int]:
    """First row of each table in the joined one, and the number of rows at the end."""
    offsets = [0]
    for config in configs:
        offsets.append(offsets[-1] + config["input_dim"])
    return offsets
