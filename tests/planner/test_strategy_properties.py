"""What holds for every plan, over many random configurations.

The checks read the lists a layer is built from and the plan's shards, and rebuild from each of them
what a lookup would return. Only the definition of a legal plan is taken for granted.
"""

import copy
import hashlib
import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from sok_like.planner import DistEmbeddingStrategy
from tests import forks

NUM_CONFIGURATIONS = 20_000 if os.environ.get("SLOW") else 4_000
PARTS = 4  # so that a failure comes early and names its part
NOT_ENOUGH = "Not enough table after slicing"


def random_arguments(rng):
    def embedding(i):
        config = {
            "name": f"table_{i}",
            "input_dim": rng.choice([1, 2, 3, rng.randint(1, 20), rng.randint(1, 3000)]),
            "output_dim": rng.choice([1, 2, 8, 16, rng.randint(1, 64)]),
            "combiner": rng.choice([None, "sum", "sum", "mean"]),
            "embeddings_initializer": {"class_name": f"Initializer{i}"},
        }
        if rng.random() < 0.2:
            config["trainable"] = rng.random() < 0.5
        if rng.random() < 0.1:
            config["embeddings_constraint"] = {"class_name": "MaxNorm"}
        return config

    def threshold(chance):
        if rng.random() > chance:
            return None
        return max(1, int(10 ** rng.uniform(0, 5.5)))

    embeddings = [embedding(i) for i in range(rng.choice([1, 1, 2, 3, rng.randint(1, 12)]))]
    table_map = None
    if rng.random() < 0.5:
        table_map = [rng.randrange(len(embeddings)) for _ in range(rng.randint(1, 12))]
    return {
        "embeddings": embeddings,
        "world_size": rng.randint(1, 16),
        "strategy": rng.choice(["basic", "memory_balanced", "memory_optimized"]),
        "input_table_map": table_map,
        "column_slice_threshold": threshold(0.5),
        "row_slice_threshold": threshold(0.3),
        "data_parallel_threshold": threshold(0.3),
    }


def assert_covers(intervals, length):
    """The intervals, in the order given, are [0, length) without gap or overlap."""
    assert [start for start, _ in intervals] == [0, *[stop for _, stop in intervals[:-1]]]
    assert intervals[-1][1] == length
    assert all(start <= stop for start, stop in intervals)


def check_shards(strategy, embeddings, world_size):
    """Every element has one owner, or all ranks if it is replicated."""
    plan = strategy.plan
    dp, col, row = strategy.table_groups
    assert sorted(dp + col + row) == list(range(len(embeddings)))
    by_table = [[] for _ in embeddings]
    for shard in plan.shards:
        by_table[shard.table_id].append(shard)
    for table, (config, shards) in enumerate(zip(embeddings, by_table, strict=True)):
        ranks = [shard.rank for shard in shards]
        rows = [(shard.row_start, shard.row_stop) for shard in shards]
        columns = [(shard.column_start, shard.column_stop) for shard in shards]
        whole_rows, whole_columns = (0, config["input_dim"]), (0, config["output_dim"])
        assert ranks == sorted(set(ranks)) and ranks and ranks[-1] < world_size
        if table in dp:
            assert ranks == list(range(world_size))
            assert set(rows) == {whole_rows} and set(columns) == {whole_columns}
        elif table in row:
            assert ranks == list(range(world_size))
            assert set(columns) == {whole_columns}
            assert_covers(rows, config["input_dim"])
            lengths = [stop - start for start, stop in rows]
            assert max(lengths) - min(lengths) <= 1
        else:
            assert set(rows) == {whole_rows}
            assert all(start < stop for start, stop in columns)
            assert_covers(columns, config["output_dim"])


def check_layers(strategy, embeddings, world_size):
    """The layers of a rank are as large as its shards, so weights fit what was built."""
    dp, col, row = strategy.table_groups
    shards = {(shard.table_id, shard.rank): shard for shard in strategy.plan.shards}
    names = []
    for rank in range(world_size):
        tables = [col[position] for position in strategy.table_ids[rank]]
        assert len(set(tables)) == len(tables)
        assert sorted(tables) == [t for t in sorted(col) if (t, rank) in shards]
        members = [k for group in strategy.local_group_list[rank] for k in group]
        assert sorted(members) == list(range(len(tables)))
        for config, group, offsets in zip(
            strategy.local_configs[rank],
            strategy.local_group_list[rank],
            strategy.local_weight_offsets[rank],
            strict=True,
        ):
            held = [shards[tables[k], rank] for k in group]
            assert [shard.num_columns for shard in held] == [config["output_dim"]] * len(group)
            assert offsets[0] == 0 and offsets[-1] == config["input_dim"]
            assert [b - a for a, b in itertools.pairwise(offsets)] == [s.num_rows for s in held]
            originals = [embeddings[tables[k]] for k in group]
            initializers = [original["embeddings_initializer"] for original in originals]
            joined = config["embeddings_initializer"]
            assert joined == (initializers if len(group) > 1 else initializers[0])
            for setting in ("combiner", "trainable", "embeddings_constraint"):
                assert {str(original.get(setting)) for original in originals} == {
                    str(config.get(setting))
                }
            if config.get("embeddings_constraint") is not None:
                assert len(group) == 1
            names.append(config["name"])
        for table, config in zip(row, strategy.row_sliced_configs[rank], strict=True):
            shard = shards[table, rank]
            assert config["input_dim"] == shard.num_rows
            assert config["output_dim"] == embeddings[table]["output_dim"]
        assert strategy.row_inputs_offsets[rank] == [
            shards[row[position], rank].row_start for position in strategy.map_groups[2]
        ]
    assert len(set(names)) == len(names)
    assert [config["name"] for config in strategy.dp_configs] == [f"table_{i}" for i in dp]


def check_outputs(strategy, embeddings, table_map, world_size):
    """Follows each input to its rows and back: output i is all columns of its table, in order."""
    dp, col, row = strategy.table_groups
    shards = {(shard.table_id, shard.rank): shard for shard in strategy.plan.shards}
    arrived = []
    for rank in range(world_size):
        for position, layer, offset in zip(
            strategy.input_ids_list[rank],
            strategy.local_maps[rank],
            strategy.local_input_offsets[rank],
            strict=True,
        ):
            group = strategy.local_group_list[rank][layer]
            member = group[strategy.local_weight_offsets[rank][layer].index(offset)]
            # An empty table would make two offsets equal; there is none.
            table = col[strategy.table_ids[rank][member]]
            assert table == table_map[strategy.input_groups[1][position]]
            shard = shards[table, rank]
            arrived.append((table, [(shard.column_start, shard.column_stop)]))
    widths = [stop - start for _, [(start, stop)] in arrived]
    assert widths == strategy.widths_list_flat
    outputs = [arrived[i] for i in strategy.rev_tp_ids]
    for start, stop in strategy.sliced_out_ranges:
        parts = outputs[start:stop]
        assert len({table for table, _ in parts}) == 1
        outputs[start:stop] = [(parts[0][0], [p for _, columns in parts for p in columns])]

    def whole(group, tables):
        return [
            (tables[position], [(0, embeddings[tables[position]]["output_dim"])])
            for position in strategy.map_groups[group]
        ]

    outputs = [*whole(0, dp), *outputs, *whole(2, row)]
    outputs = [outputs[i] for i in strategy.rev_group_ids]
    assert [table for table, _ in outputs] == table_map
    for table, columns in outputs:
        assert_covers(columns, embeddings[table]["output_dim"])


def refusal_is_right(arguments):
    """A plan is refused only if a rank had nothing and a smaller threshold would give it some."""
    world_size = arguments["world_size"]
    threshold = arguments["column_slice_threshold"]
    arguments = {**arguments, "column_slice_threshold": 1}
    smallest = DistEmbeddingStrategy(**arguments)
    assert threshold is not None
    assert smallest.table_groups[0] == smallest.table_groups[2] == []
    # Tables are never cut into more slices than this, so these slices cannot fill the ranks.
    sizes = [config["input_dim"] * config["output_dim"] for config in arguments["embeddings"]]
    slices = 0
    for size, config in zip(sizes, arguments["embeddings"], strict=True):
        count = 1
        while size > threshold * count:
            count *= 2
        slices += min(count, world_size, config["output_dim"])
    held = {shard.rank for shard in smallest.plan.shards}
    return slices < world_size and len(held) > slices


def cuts_a_constraint(arguments):
    """Whether a table whose MaxNorm reads whole columns has more elements than thresholds allow."""
    constrained = [c for c in arguments["embeddings"] if "embeddings_constraint" in c]
    sizes = [c["input_dim"] * c["output_dim"] for c in constrained]
    replicated = arguments["data_parallel_threshold"] or 0
    row_wise = arguments["row_slice_threshold"]
    return row_wise and any(size >= row_wise and size > replicated for size in sizes)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_plan_is_whole(part):
    rng = random.Random(part)
    refused = 0
    started = time.process_time()
    for number in range(NUM_CONFIGURATIONS // PARTS):
        arguments = random_arguments(rng)
        before = copy.deepcopy(arguments) if number % 10 == 0 else None
        try:
            strategy = DistEmbeddingStrategy(**arguments)
        except ValueError as error:
            if "must not need all of them" in str(error):
                assert cuts_a_constraint(arguments), arguments
                continue
            assert NOT_ENOUGH in str(error), arguments
            assert refusal_is_right(arguments), arguments
            refused += 1
            continue
        embeddings, world_size = arguments["embeddings"], arguments["world_size"]
        table_map = arguments["input_table_map"] or list(range(len(embeddings)))
        try:
            check_shards(strategy, embeddings, world_size)
            check_layers(strategy, embeddings, world_size)
            check_outputs(strategy, embeddings, table_map, world_size)
            if before is not None:
                assert arguments == before
                assert vars(DistEmbeddingStrategy(**arguments)) == vars(strategy)
        except AssertionError as error:
            raise AssertionError(f"{arguments}") from error
    assert 0 < refused < 0.2 * NUM_CONFIGURATIONS / PARTS
    assert time.process_time() - started < 60 / PARTS


def plans_digest():
    """A digest of 300 plans, equal in every process."""
    rng = random.Random(99)
    digest = hashlib.sha256()
    for _ in range(300):
        arguments = random_arguments(rng)
        try:
            plan = repr(sorted(vars(DistEmbeddingStrategy(**arguments)).items()))
        except ValueError as error:
            plan = str(error)
        digest.update(plan.encode())
    return digest.hexdigest()


def test_every_process_finds_the_same_plan():
    program = "from tests.planner.test_strategy_properties import plans_digest as d; print(d())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program]
    options = {"cwd": forks.ROOT, "capture_output": True, "text": True, "check": True}
    found = subprocess.run(command, env=environment, **options).stdout
    assert found == plans_digest() + "\n"
