"""Gradients under a distribution are those of one process: norms, clipping, sums of steps."""

import pytest

from tests.checks import distribution_steps as steps
from tests.distribution.test_ranks import assert_close

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
CASES = [
    (world_size, check)
    for world_size in (2, 4)
    for check in steps.checks(world_size)
    if "x" in check.split(".")[0]
]


@pytest.mark.parametrize("world_size, check", CASES)
def test_changed_gradients_are_those_of_one_process(rank_results, world_size, check):
    ranks = rank_results(world_size, f"distribution_steps.{check}")
    for rank, result in enumerate(ranks):
        assert result["expected"]["losses"][-1] != result["expected"]["losses"][0]
        assert_close(result["sharded"], result["expected"], f"rank {rank}:")


def test_gradients_add_up_in_variables_of_the_program(rank_results):
    for rank, result in enumerate(rank_results(2, "distribution_steps.accumulated")):
        assert_close(result["sharded"], result["expected"], f"rank {rank}:")


@pytest.mark.parametrize("case", ["slices", "shape"])
def test_gradient_of_unknown_part_is_refused(rank_results, case):
    for rank in rank_results(2, "distribution_steps.wrong"):
        assert "must come from `tf.GradientTape.gradient`" in rank[case]
        assert "rows" in rank[case] and "(9, 3)" in rank[case]


@pytest.mark.parametrize("check", ["penalties", "of_inputs", "chained"])
@pytest.mark.parametrize("shape", ["(1, 2)", "(2, 1)"])
def test_penalties_are_those_of_one_process(rank_results, check, shape):
    for rank, result in enumerate(rank_results(2, f"distribution_steps.{check}")):
        assert_close(result[shape], result["expected"], f"rank {rank}:")
