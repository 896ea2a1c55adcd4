"""Variables of sok2 among TensorFlow's own tools, on one to three ranks, against NumPy."""

import numpy as np
import pytest

from tests.checks import sok2_dense as check
from tests.ranks import run_ranks

WORLDS = [1, *(pytest.param(n, marks=pytest.mark.ranks) for n in (2, 3))]
each_world = pytest.mark.parametrize("world_size", WORLDS)
MODES = ("distributed", "localized")


def whole(parts):
    """The table from the row numbers and rows of each rank."""
    table = np.full([check.ROWS, check.DIM], np.nan)
    for numbers, rows in parts:
        table[numbers] = rows
    return table


def gradient():
    of_table = np.zeros([check.ROWS, check.DIM])
    of_table[check.KEYS] = check.KERNEL
    return of_table


@each_world
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["eager", "function", "outside"])
def test_norms_are_those_of_one_process(rank_results, world_size, mode, how):
    found = [result[f"{mode} {how}"] for result in rank_results(world_size, "sok2_dense.clipped")]
    # Each rank has the same batch, and its share of the loss.
    of_kernel = check.START[check.KEYS].sum(0) / world_size
    alone = np.sqrt((gradient() ** 2).sum())
    norm = np.sqrt(alone**2 + (of_kernel**2).sum())
    np.testing.assert_allclose([norm for norm, _, _ in found], norm, rtol=1e-5)
    together = whole([part for _, part, _ in found])
    np.testing.assert_allclose(together, gradient() * check.LIMIT / norm, rtol=1e-5)
    by_itself = whole([part for _, _, part in found])
    np.testing.assert_allclose(by_itself, gradient() * check.LIMIT / alone, rtol=1e-5)


@each_world
@pytest.mark.parametrize("mode", MODES)
def test_a_session_trains(rank_results, world_size, mode):
    found = whole([result[mode] for result in rank_results(world_size, "sok2_dense.session")])
    np.testing.assert_allclose(found, check.START - 2 * check.RATE * gradient(), rtol=1e-5)


@each_world
def test_a_v1_saver_writes_all_rows_or_raises(rank_results, world_size):
    results = rank_results(world_size, "sok2_dense.v1_saver")
    np.testing.assert_array_equal(whole([rows for _, rows in results]), check.START)
    for message, _ in results:
        if world_size == 1:
            assert message is None
        else:
            assert "'saved:0'" in message and f"{world_size} ranks" in message


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_keeps_the_rows_of_all_ranks(world_size):
    results = run_ranks("tests.checks.sok2_dense:checkpoint", world_size)
    for mode in MODES:
        np.testing.assert_array_equal(whole([result[mode] for result in results]), check.START)
