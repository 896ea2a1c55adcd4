"""Slices, ranks, groups and joins of small cases, worked out by hand; the report; refusals."""

import pytest

from sok_like.planner import DistEmbeddingStrategy, TableConfig
from sok_like.planner.placement import automatic_threshold, place


def tables(*shapes, **settings):
    return [
        {"name": f"t{i}", "input_dim": a, "output_dim": b, **settings}
        for i, (a, b) in enumerate(shapes)
    ]


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


class Layer:
    def __init__(self, **config):
        self._config = config

    def get_config(self):
        return self._config


class OtherLayer(Layer):
    pass


def test_groups():
    # 10, 100, 1000 and 50 elements. "At most" and "at least" include the threshold itself.
    shapes = tables((5, 2), (10, 10), (100, 10), (25, 2))
    strategy = DistEmbeddingStrategy(
        shapes, 3, input_table_map=[3, 2, 1, 0, 2], row_slice_threshold=100,
        data_parallel_threshold=10, column_slice_threshold=1000,
    )  # fmt: skip
    assert strategy.table_groups == [[0], [3], [1, 2]]
    assert strategy.input_groups == [[3], [0], [1, 2, 4]]
    assert strategy.map_groups == [[0], [0], [1, 0, 1]]
    # Laid end to end: 3, 0, 1, 2, 4. Input 0 is second there, input 3 first.
    assert strategy.rev_group_ids == [1, 2, 3, 0, 4]
    assert [c["name"] for c in strategy.dp_configs] == ["t0"]
    rows = [[c["input_dim"] for c in rank] for rank in strategy.row_sliced_configs]
    assert rows == [[4, 34], [3, 33], [3, 33]]
    assert strategy.row_inputs_offsets == [[0, 0, 0], [34, 4, 34], [67, 7, 67]]
    assert strategy.row_sliced_configs[1][0]["name"] == "t1_rows_4_7"


def test_one_rank_holds_tables_whole():
    strategy = DistEmbeddingStrategy(
        tables((10, 10), (3, 4)), 1, "memory_balanced",
        column_slice_threshold=1, row_slice_threshold=0, data_parallel_threshold=1000,
    )  # fmt: skip
    assert strategy.strategy == "basic"
    assert strategy.table_groups == [[], [0, 1], []]
    assert [c["output_dim"] for c in strategy.local_configs[0]] == [10, 4]
    none = DistEmbeddingStrategy(tables((1, 1)), 2, data_parallel_threshold=0)
    assert none.table_groups == [[], [0], []]


def test_tables_that_agree_are_joined():
    shapes = tables((3, 8), (4, 4), (5, 8), (6, 8), combiner="sum")
    for i, config in enumerate(shapes):
        config["embeddings_initializer"] = f"initializer {i}"
    strategy = DistEmbeddingStrategy(shapes, 1, input_table_map=[3, 1, 0, 2, 0])
    assert strategy.local_group_list == [[[0, 2, 3], [1]]]
    assert strategy.local_weight_offsets == [[[0, 3, 8, 14], [0, 4]]]
    assert strategy.input_ids_list == [[2, 4, 1, 3, 0]]
    assert strategy.local_maps == [[0, 0, 1, 0, 0]]
    assert strategy.local_input_offsets == [[0, 0, 0, 3, 8]]
    joined, single = strategy.local_configs[0]
    assert (joined["input_dim"], single["input_dim"]) == (14, 4)
    initializers = ["initializer 0", "initializer 2", "initializer 3"]
    assert joined["embeddings_initializer"] == initializers
    assert single["embeddings_initializer"] == "initializer 1"
    assert joined["name"] == "t0_and_2_more"


L2 = {"class_name": "L2", "config": {"l2": 0.1}}


@pytest.mark.parametrize(
    "left, right, joined",
    [
        ({}, {"combiner": None}, True),
        ({"dtype": "float32"}, {"dtype": "float16"}, False),
        ({"mask_zero": True}, {"mask_zero": False}, False),
        ({"embeddings_regularizer": L2}, {"embeddings_regularizer": L2}, True),
        ({"embeddings_regularizer": L2}, {}, False),
        ({"seed": 1}, {"seed": 2}, False),  # a custom layer's own setting
    ],
)
def test_only_tables_that_agree_are_joined(left, right, joined):
    both = [{"input_dim": 3, "output_dim": 4, **left}, {"input_dim": 5, "output_dim": 4, **right}]
    strategy = DistEmbeddingStrategy(both, 1)
    assert strategy.local_group_list == [[[0, 1]] if joined else [[0], [1]]]


def test_classes_are_not_mixed():
    config = {"input_dim": 3, "output_dim": 4}
    layers = [Layer(**config), OtherLayer(**config), Layer(**config)]
    strategy = DistEmbeddingStrategy(layers, 1)
    assert strategy.local_group_list == [[[0, 2], [1]]]
    assert [c["layer_type"] for c in strategy.local_configs[0]] == [Layer, OtherLayer]


def test_configurations_are_left_alone():
    layer = Layer(input_dim=8, output_dim=8, name="a")
    plain = {"input_dim": 8, "output_dim": 8, "name": "b"}
    first = DistEmbeddingStrategy([layer, plain], 2, column_slice_threshold=8)
    first.local_configs[0][0].pop("layer_type")
    assert layer.get_config() == {"input_dim": 8, "output_dim": 8, "name": "a"}
    assert plain == {"input_dim": 8, "output_dim": 8, "name": "b"}
    assert [c["layer_type"] for c in first.global_configs] == [Layer, None]


def test_report():
    shapes = tables((10, 4), (8, 6), (2, 3), combiner="sum")
    strategy = DistEmbeddingStrategy(
        shapes, 2, row_slice_threshold=48, data_parallel_threshold=6, column_slice_threshold=20
    )
    report = strategy.report(local_batch=100, hotness=[3, 2, 1], slots_per_row=2)
    # t0: two slices of two columns: 10 * 2 * 4 bytes * 3. The other rank's 300 keys of 8 bytes, and
    # 100 rows of 8 bytes forth and back.
    # t1: four rows each: half of 200 keys, 24 bytes per row forward and back.
    # t2: no keys; 100 gradients of 12 bytes with their keys.
    expected = """\
rank  table  kind           rows  columns  bytes  keys/step  bytes/step
   0  t0     column-wise    0:10      0:2    240        300       4,000
   0  t1     row-wise        0:4      0:6    288        100       5,600
   0  t2     data-parallel   0:2      0:3     72          0       2,000
   0  all                                    600        400      11,600
   1  t0     column-wise    0:10      2:4    240        300       4,000
   1  t1     row-wise        4:8      0:6    288        100       5,600
   1  t2     data-parallel   0:2      0:3     72          0       2,000
   1  all                                    600        400      11,600
largest rank 600 bytes, 1.00 of the mean"""
    assert report == expected


def test_report_of_an_idle_rank():
    lines = DistEmbeddingStrategy(tables((10, 1)), 2).report().splitlines()
    assert lines[3].split() == ["1", "idle", "0", "0", "0"]
    assert lines[4] == "largest rank 40 bytes, 2.00 of the mean"


MAP = "Wrong input initializing input/map groups"
TOO_FEW = "Not enough table after slicing to run on all worker. Try decrease column_slice_threshold"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"strategy": "random"}, "Unsupported shard strategy.*Received: strategy='random'"),
        ({"strategy": None}, "Unsupported shard strategy.*Received: strategy=None"),
        ({"world_size": 0}, "`world_size` must be a positive integer. Received: world_size=0"),
        ({"world_size": "2"}, "`world_size` must be a positive integer. Received: world_size='2'"),
        *[
            ({name: value}, f"`{name}` must be .* >= {least}. Received: {name}={value!r}")
            for name, least, values in [
                ("column_slice_threshold", 1, [0, -5, 2e7, "9", True]),
                ("row_slice_threshold", 0, [-1, 1.5]),
                ("data_parallel_threshold", 0, [-1, 10.0]),
            ]
            for value in values
        ],
        ({"input_table_map": [0, 2]}, rf"{MAP}.*\[0, 2\).*input_table_map\[1\]=2"),
        ({"input_table_map": [-1]}, rf"{MAP}.*input_table_map\[0\]=-1"),
        ({"input_table_map": [0.0]}, rf"{MAP}.*input_table_map\[0\]=0.0"),
        (
            {"world_size": 4, "column_slice_threshold": 1000},
            TOO_FEW + r" or decrease worker count.*leaves ranks \[2, 3\]",
        ),
        ({"embeddings": []}, "`embeddings` must hold at least one embedding"),
        (
            {"embeddings": [{"input_dim": 3, "output_dim": 0}]},
            "`output_dim` of .*output_dim=0",
        ),
        ({"embeddings": [{"output_dim": 2}]}, r"`input_dim` of embeddings\[0\].*input_dim=None"),
    ],
)
def test_refused(arguments, message):
    arguments = {"embeddings": tables((10, 8), (20, 8)), "world_size": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        DistEmbeddingStrategy(**arguments)


def test_other_refusals():
    group = DistEmbeddingStrategy(tables((3, 2)), 2).init_input_and_map_groups
    assert group([[2], [], []], [2, 2]) == ([[0, 1], [], []], [[0, 0], [], []], [0, 1])
    with pytest.raises(ValueError, match=rf"{MAP}.*Received: input_table_map\[1\]=1"):
        group([[0], [2], []], [0, 1])
    with pytest.raises(TypeError, match=r"Received: embeddings\[1\]=7"):
        DistEmbeddingStrategy([*tables((3, 2)), 7], 2)
    for arguments, message in (
        ({"hotness": [1, 2]}, r"one per input \(1 of them\)"),
        ({"hotness": [-1]}, r"`hotness\[0\]` must be an integer >= 0"),
        ({"slots_per_row": 0.5}, "slots_per_row=0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            DistEmbeddingStrategy(tables((3, 2)), 2).report(**arguments)
