"""Batches that differ over ranks raise on all of them, before any weight has changed."""

import numpy as np
import pytest

from tests.checks import distribution_batches as batches

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
NAMES = {"weights": "sample_weight", "y": "y", "targets": "y"}


@pytest.mark.parametrize("case", batches.CASES)
def test_batches_that_differ_raise(rank_results, case):
    _, what, _ = batches.CASES[case]
    for said, change in rank_results(2, f"distribution_batches.{case}"):
        assert said is not None and "Every rank must get the same batches" in said
        assert "on rank 1 other values than on rank 0" in said
        assert f"in {NAMES.get(what, 'inputs')}." in said
        assert change == 0.0


@pytest.mark.parametrize("case", batches.SAME)
def test_same_batches_do_not_raise(rank_results, case):
    for said, change in rank_results(2, f"distribution_batches.same_{case}"):
        assert said is None
        assert change > 0


@pytest.mark.parametrize("world_size, shape", [(2, "1x2"), (2, "2x1"), (4, "2x2")])
def test_ranks_may_read_their_own_samples(rank_results, world_size, shape):
    for result in rank_results(world_size, f"distribution_batches.own_{shape}"):
        assert result["of_shard"] is None
        if shape == "2x1":  # each rank is a shard of its own
            assert result["of_rank"] is None
        else:
            assert "on rank 1 other values than on rank 0 in inputs." in result["of_rank"]


def test_rounding_and_missing_values_do_not_raise(rank_results):
    for numbers, missing in rank_results(2, "distribution_batches.nearly"):
        assert np.isfinite(numbers).all()
        assert np.isnan(missing[0]).all() and np.isfinite(missing[1:]).all()
