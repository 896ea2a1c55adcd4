"""Slices and ranks of small cases, worked out by hand."""

import pytest

from sok_like.planner import DistEmbeddingStrategy, TableConfig
from sok_like.planner.placement import automatic_threshold, place


def tables(*shapes):
    return [{"name": f"t{i}", "input_dim": a, "output_dim": b} for i, (a, b) in enumerate(shapes)]


def configs(*shapes):
    return [TableConfig(i, a, b, {}) for i, (a, b) in enumerate(shapes)]


@pytest.mark.parametrize(
    "shapes, world_size, expected",
    [
        ([(10, 8)] * 4, 4, None),
        ([(10, 8)], 2, 79),
        ([(10, 8)], 4, 39),
        ([(10, 8)], 3, 39),  # 80 -> 40, 40 -> 40, 20, 20
        ([(100, 8), (10, 8)], 3, 799),
        # By size alone the first would be cut into four; it has two columns only, so the second is
        # cut in its place: 999 leaves 2 + 1 slices.
        ([(1000, 2), (10, 64)], 4, 639),
        ([(1000, 2)], 4, 999),  # no threshold gives four ranks something
        ([(1, 1)], 4, None),
        ([(2, 1)], 8, 1),
        ([], 4, None),
    ],
)
def test_automatic_threshold(shapes, world_size, expected):
    assert automatic_threshold(configs(*shapes), world_size) == expected


def test_place_memory_balanced():
    # Descending by size, then table: 3 (9), 4 (7), 2 (5), 1 (5), 0 (2), 5 (1), 6 (1 of table 4).
    sizes = [2, 5, 5, 9, 7, 1, 1]
    assert place("memory_balanced", 2, [0, 1, 2, 3, 4, 5, 4], sizes) == [[3, 0, 1], [4, 5, 2, 6]]
    # Two ranks: forth 3, 4; back 2, 1; forth 0, 5; back 6. Three: 3, 4, 2; 1, 0, 5; 6.
    assert place("memory_balanced", 3, [0, 1, 2, 3, 4, 5, 4], sizes) == [[3, 6, 5], [4, 0], [2, 1]]


def test_place_memory_optimized():
    # 9 to rank 0; 5, 5 to rank 1, which then has 10; 2 to rank 0 (11); 1 to rank 1 (11); 1 to
    # rank 0, the first of two equals.
    ranks = place("memory_optimized", 2, [0, 1, 2, 3, 4, 5], [2, 5, 5, 9, 1, 1])
    assert ranks == [[3, 0, 4], [2, 1, 5]]


def test_basic_plan():
    # Automatic: 800, 40 on three ranks: 400, 400, 40, threshold 799.
    strategy = DistEmbeddingStrategy(tables((100, 8), (10, 4)), 3)
    assert strategy.table_ids == [[0], [0], [1]]
    assert strategy.input_ids_list == [[0], [0], [1]]
    assert strategy.widths_list_flat == [4, 4, 4]
    assert strategy.rev_tp_ids == [0, 1, 2]
    assert strategy.sliced_out_ranges == [[0, 2]]
    names = [config["name"] for rank in strategy.local_configs for config in rank]
    assert names == ["t0_columns_0_4", "t0_columns_4_8", "t1"]


def test_weights_are_cut_as_layers_are():
    # 1600 elements, four slices of 400, and a table of 400 that comes first by its id. The fifth
    # piece goes back to rank 3.
    strategy = DistEmbeddingStrategy(tables((50, 32), (50, 8)), 4, "memory_balanced", None, 500)
    assert strategy.table_ids == [[1], [0], [0], [0]]
    widths = [config["output_dim"] for rank in strategy.local_configs for config in rank]
    assert widths == [8, 8, 8, 16]
    shards = strategy.plan.shards_of(0)
    assert [(s.rank, s.column_start, s.column_stop) for s in shards] == [
        (1, 0, 8),
        (2, 8, 16),
        (3, 16, 32),
    ]
    assert strategy.sliced_out_ranges == [[0, 3]]


def test_both_spellings():
    strategy = DistEmbeddingStrategy(tables((4, 2), (4, 2)), 2)
    sliced, ranges = strategy.create_col_sliced_configs(strategy.global_configs, 2, 4, [0, 1, 0])
    assert ranges == [[0, 2], [1, 3], [2, 4]]
    expected = [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert strategy.apply_stragety("basic", 2, sliced) == expected
    assert strategy.apply_strategy("basic", 2, sliced) == expected
