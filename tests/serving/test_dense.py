"""Dense tables and variables whose slices lie on several ranks: no rank gathers one."""

import pytest

from tests.checks.serving_dense import cases_on
from tests.serving.test_parts import WORLDS

pytestmark = pytest.mark.keras(slow=True)
KINDS = ("rows", "parallel")


TABLES = [
    pytest.param(*each.values, case, marks=each.marks)
    for each in WORLDS
    for case in cases_on(*each.values)
]


@pytest.mark.parametrize("world_size, case", TABLES)
def test_a_saved_model_and_its_deltas_have_the_rows_that_were_set(rank_results, world_size, case):
    found = rank_results(world_size, "serving_dense.tables")[0][case]
    assert found["differs"] == [[]] * 3
    assert len(found["kinds"]) == (3 if world_size > 1 else 1)
    assert found["files"] > 4 and found["left"] == ["tables"]


LAYOUTS = ("rows", "columns", "middle", "bfloat16_rows", "float16_rows", "batch")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", LAYOUTS)
def test_it_has_the_variables_of_a_sharded_model_to_the_bit(rank_results, world_size, case):
    check_variables(rank_results(world_size, "serving_dense.parallel")[0][case])


@pytest.mark.parametrize("world_size", [pytest.param(4, marks=pytest.mark.ranks)])
def test_of_ranks_with_the_same_shard_one_writes_it(rank_results, world_size):
    check_variables(rank_results(world_size, "serving_dense.grid")[0]["grid"])


def check_variables(found):
    assert found["stored"] and found["before"] and found["after"]
    assert found["floats"] == 5  # without the slot variables of Adam


LARGE = [
    *(pytest.param(*each.values, kind, marks=each.marks) for each in WORLDS for kind in KINDS),
    *(pytest.param(*each.values, "columns", marks=each.marks) for each in WORLDS[:2]),
]


@pytest.mark.parametrize("world_size, kind", LARGE)
def test_no_rank_holds_a_table_and_each_writes_its_share(rank_results, world_size, kind):
    ranks = rank_results(world_size, f"serving_dense.peak_{kind}")
    for call in ("export", "delta"):
        for rank in ranks:
            assert rank[call]["peak"] < 0.5 * rank["table"], (call, rank)
            assert rank[call]["written"] < 1.25 * rank["table"] / world_size, (call, rank)
        if (call, world_size) != ("export", 1):  # which TensorFlow writes
            assert sum(rank[call]["written"] for rank in ranks) == ranks[0]["table"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_after_a_rank_has_failed_the_next_delta_has_it_all(rank_results, world_size):
    for number, rank in enumerate(rank_results(world_size, "serving_dense.cannot")):
        *failed, differ = rank["messages"]
        assert world_size == 1 or "ValueError: Every rank must export a model" in differ
        for message in failed:
            assert "could not be written: the disk is full" in message
            assert world_size == 1 or f"rank {world_size - 1}: " in message
        if number == 0:
            assert rank["left"] == [[], ["model", "model.deltas"]]
        assert rank["differs"] == [] and rank["num_rows"] == 300
