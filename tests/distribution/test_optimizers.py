"""Optimizers and mixed precision on sharded variables are those of one process."""

import numpy as np
import pytest

from tests.checks import distribution_optimizers as optimizers
from tests.distribution.test_ranks import assert_close

pytestmark = [pytest.mark.keras, pytest.mark.ranks]


@pytest.mark.parametrize(
    "world_size, name", [(n, name) for n in (1, 2, 4) for name in optimizers.names(n)]
)
def test_optimizer_is_that_of_one_process(rank_results, world_size, name):
    for rank, result in enumerate(rank_results(world_size, "distribution_optimizers.each")):
        assert_close(result["sharded"][name], result["expected"][name], f"rank {rank}:")


@pytest.mark.parametrize("name", ["default", "clipped"])
def test_compiled_optimizer_is_that_of_one_process(rank_results, name):
    for rank, result in enumerate(rank_results(2, "distribution_optimizers.compiled")):
        assert_close(result["sharded"][name], result["expected"][name], f"rank {rank}:")


@pytest.mark.parametrize("shape", ["(1, 2)", "(2, 1)"])
def test_optimizer_that_is_not_wrapped_trains_shards(rank_results, shape):
    for rank, result in enumerate(rank_results(2, "distribution_optimizers.plain")):
        assert result["expected"]["adam"]["iterations"] == optimizers.STEPS
        assert_close(result[shape], result["expected"], f"rank {rank}:")


@pytest.mark.parametrize("name", optimizers.without_average())
def test_a_rank_without_an_element_takes_part(rank_results, name):
    for rank, result in enumerate(rank_results(2, "distribution_optimizers.short")):
        assert_close(result["sharded"][name], result["expected"][name], f"rank {rank}:")


@pytest.mark.parametrize("shape", ["(1, 2)", "(2, 1)"])
def test_mixed_precision_is_that_of_one_process(rank_results, shape):
    for result in rank_results(2, "distribution_optimizers.mixed"):
        assert len(result[shape]) >= 2
        for name, weights in result[shape].items():
            for path, found in weights.items():
                # Terms of 8 (bfloat16) or 11 bits are added in another order.
                expected = result["expected"][name][path]
                assert np.isfinite(expected).all()
                np.testing.assert_allclose(found, expected, atol=5e-3, err_msg=f"{name} {path}")


def test_optimizers_of_whole_variables_train_whole_ones(rank_results):
    for rank, result in enumerate(rank_results(2, "distribution_optimizers.unsharded")):
        assert set(result["sharded"]) == set(optimizers.whole_ones())
        assert_close(result["sharded"], result["expected"], f"rank {rank}:")


def test_optimizers_of_whole_variables_refuse_shards(rank_results):
    for rank in rank_results(2, "distribution_optimizers.refused"):
        assert set(rank) == {*optimizers.whole_ones(), "Own"}
        for name, said in rank.items():
            assert "must update each element independently" in said, said
            assert "wide/kernel" in said and (
                name != "Own" or "Own has its own update_step" in said
            )
