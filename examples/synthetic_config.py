"""Six recommendation models from tiny to colossal, as in DMP's synthetic benchmark.

    model      tables   tables only (float32)
    tiny           55         4.2 GiB
    small         107        26.3 GiB
    medium        311       206.2 GiB
    large         612       773.8 GiB
    jumbo       1,022     3,109.5 GiB
    colossal    2,002    22,327.4 GiB

Each has a few huge tables and many small ones. A table with several hotnesses is shared: it has one
input per hotness. Rows of a sample are summed.
"""

from __future__ import annotations

import dataclasses

# Scaling keeps at least this many rows, the number of the smallest tables.
FEWEST_ROWS = 10


@dataclasses.dataclass(frozen=True)
class TableGroup:
    """Tables of one size.

    Attributes:
        num_tables: Number of tables.
        hotness: Ids per sample, for each input of a table.
        num_rows: Rows of each table.
        width: Length of a row.
    """

    num_tables: int
    hotness: tuple[int, ...]
    num_rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Table:
    num_rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Input:
    """One categorical input: `hotness` ids per sample of table number `table`."""

    table: int
    hotness: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model.

    Attributes:
        groups: Its tables.
        mlp_units: Widths of the dense layers; one of width 1 follows.
        num_numerical: Numerical features of a sample.
        pool: The concatenated embeddings are averaged over this many neighbouring columns before
            the dense layers; 1 leaves them unchanged.
    """

    groups: tuple[TableGroup, ...]
    mlp_units: tuple[int, ...]
    num_numerical: int
    pool: int = 1

    def tables(self, scale: float = 1.0) -> list[Table]:
        """All tables, their rows multiplied by `scale`."""
        return [
            Table(scaled_rows(group.num_rows, scale), group.width)
            for group in self.groups
            for _ in range(group.num_tables)
        ]

    def inputs(self) -> list[Input]:
        """All categorical inputs, table after table."""
        hotness = [group.hotness for group in self.groups for _ in range(group.num_tables)]
        return [Input(table, hot) for table, each in enumerate(hotness) for hot in each]


def scaled_rows(num_rows: int, scale: float) -> int:
    return max(round(num_rows * scale), min(num_rows, FEWEST_ROWS))


def _groups(hottest: int, shared, alone) -> tuple[TableGroup, ...]:
    """Shared tables have inputs of hotness 1 and of the largest; others have one of hotness 1."""
    return (
        *(TableGroup(count, (1, hottest), rows, width) for count, rows, width in shared),
        *(TableGroup(count, (1,), rows, width) for count, rows, width in alone),
    )


K, M = 1000, 1000**2

# (Number of tables, rows, width): the shared tables first.
MODELS = {
    "tiny": ModelConfig(
        _groups(
            10,
            [(1, 10 * K, 8), (1, M, 16), (1, 25 * M, 16)],
            [
                (1, 25 * M, 16),
                (16, 10, 8),
                (10, K, 8),
                (4, 10 * K, 8),
                (2, 100 * K, 16),
                (19, M, 16),
            ],
        ),
        mlp_units=(256, 128),
        num_numerical=10,
    ),
    "small": ModelConfig(
        _groups(
            30,
            [(5, 10 * K, 16), (3, 4 * M, 32), (1, 50 * M, 32)],
            [
                (1, 50 * M, 32),
                (30, 10, 16),
                (30, K, 16),
                (5, 10 * K, 16),
                (5, 100 * K, 32),
                (27, 4 * M, 32),
            ],
        ),
        mlp_units=(512, 256, 128),
        num_numerical=10,
    ),
    "medium": ModelConfig(
        _groups(
            50,
            [(20, 100 * K, 64), (5, 10 * M, 64), (1, 100 * M, 128)],
            [
                (1, 100 * M, 128),
                (80, 10, 32),
                (60, K, 32),
                (80, 100 * K, 64),
                (24, 200 * K, 64),
                (40, 10 * M, 64),
            ],
        ),
        mlp_units=(1024, 512, 256, 128),
        num_numerical=25,
        pool=7,
    ),
    "large": ModelConfig(
        _groups(
            100,
            [(40, 100 * K, 64), (16, 15 * M, 64), (1, 200 * M, 128)],
            [
                (1, 200 * M, 128),
                (100, 10, 32),
                (100, 10 * K, 32),
                (160, 100 * K, 64),
                (50, 500 * K, 64),
                (144, 15 * M, 64),
            ],
        ),
        mlp_units=(2048, 1024, 512, 256),
        num_numerical=100,
        pool=8,
    ),
    "jumbo": ModelConfig(
        _groups(
            200,
            [(50, 100 * K, 128), (24, 20 * M, 128), (1, 400 * M, 256)],
            [
                (1, 400 * M, 256),
                (100, 10, 32),
                (200, 10 * K, 64),
                (350, 100 * K, 128),
                (80, M, 128),
                (216, 20 * M, 128),
            ],
        ),
        mlp_units=(2048, 1024, 512, 256),
        num_numerical=200,
        pool=20,
    ),
    "colossal": ModelConfig(
        _groups(
            300,
            [(100, 100 * K, 128), (50, 40 * M, 256), (1, 2000 * M, 256)],
            [
                (1, 1000 * M, 256),
                (100, 10, 32),
                (400, 10 * K, 128),
                (100, 100 * K, 128),
                (800, M, 128),
                (450, 40 * M, 256),
            ],
        ),
        mlp_units=(4096, 2048, 1024, 512, 256),
        num_numerical=500,
        pool=30,
    ),
}
