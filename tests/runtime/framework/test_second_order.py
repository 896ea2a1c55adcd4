"""Several tapes around one lookup: each gives its gradients; a gradient of a gradient raises."""

import numpy as np
import pytest

from tests.checks.tapes import KEYS, ROWS

each_world = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])


def check_by_key(results, expected):
    """Each rank's gradient has its own keys with what all ranks together make of their rows."""
    seen = {}
    for gradient in results:
        for key, row in gradient.items():
            assert key not in seen
            seen[key] = row
    assert sorted(seen) == sorted(set(KEYS))
    for key, row in seen.items():
        times = KEYS.count(key) * len(results)
        np.testing.assert_allclose(row, times * expected(ROWS[key]), rtol=1e-6)


@each_world
@pytest.mark.parametrize("place", ["eager", "within", "around"])
def test_two_tapes_have_the_gradients_of_one(rank_results, world_size, place):
    results = [result[place] for result in rank_results(world_size, "tapes.two_tapes")]
    for of_factor, _ in results:
        np.testing.assert_allclose(of_factor, (ROWS[KEYS] ** 2).sum(), rtol=1e-6)
    check_by_key([of_table for _, of_table in results], lambda row: 2.0 * 2 * row)


@each_world
@pytest.mark.parametrize("place", ["eager", "function"])
def test_a_gradient_of_a_tables_gradient_raises(rank_results, world_size, place):
    for result in rank_results(world_size, "tapes.second_order"):
        assert "cannot be differentiated again" in result[place][1]


@each_world
@pytest.mark.parametrize("place", ["eager", "function"])
def test_a_gradient_of_the_rows_gradient_is_right(rank_results, world_size, place):
    # (d/dr sum (3 r^2)^2) = 36 r^3
    results = rank_results(world_size, "tapes.second_order")
    check_by_key([result[place][0] for result in results], lambda row: 36 * row**3)
