"""Tables that the ranks write in parts: the rows, the memory, and what happens if a rank fails."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.serving_parts import cases_on

MARKS = {1: [], 2: [pytest.mark.ranks], 3: [pytest.mark.ranks]}
WORLDS = [pytest.param(world_size, marks=marks) for world_size, marks in MARKS.items()]


def narrow(rows, row_dtype):
    """What rows float32 `[..., dim]` are after an export in another dtype."""
    if row_dtype == "float32":
        return rows
    if row_dtype == "bfloat16":
        return tf.cast(tf.cast(rows, tf.bfloat16), tf.float32).numpy()
    wanted = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
    scales = tf.cast(tf.cast(wanted, tf.bfloat16), tf.float32).numpy()
    # To nearest, and then up: bfloat16 has 8 bits.
    above = (scales.view(np.uint32) + 0x10000).view(np.float32)
    scales = np.where((scales < wanted) & (wanted > 0), above, scales)
    return np.rint(rows / np.where(scales > 0, scales, np.float32(1))) * scales


@pytest.mark.parametrize(
    "world_size, case",
    [pytest.param(n, case, marks=MARKS[n]) for n in MARKS for case in cases_on(n)],
)
def test_a_saved_model_has_the_rows_of_all_ranks(rank_results, world_size, case):
    found = rank_results(world_size, "serving_parts.in_parts")[0][case]
    rows, expected, missing = found["rows"], found["expected"], found["missing"]
    expected[~missing] = narrow(expected[~missing], found["row_dtype"])
    np.testing.assert_array_equal(rows, expected)
    assert found["left"] == []
    if not case.endswith("_key"):
        assert found["files"] > 2 + world_size and np.abs(expected).max() > 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_no_rank_holds_a_table_and_each_writes_its_share(rank_results, world_size):
    ranks = rank_results(world_size, "serving_parts.peak")
    for rank in ranks:
        assert rank["peak"] < 0.5 * rank["table"], rank
        assert rank["written"] < 1.25 * rank["table"] / world_size, rank
    assert sum(rank["written"] for rank in ranks) == ranks[0]["table"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_if_a_rank_fails_all_raise_and_the_previous_model_is_left(rank_results, world_size):
    for rank in rank_results(world_size, "serving_parts.cannot"):
        full, not_finite = rank["messages"]
        assert "the disk is full" in full and "`row_dtype` int8 needs finite rows" in not_finite
        if world_size > 1:
            assert f"rank {world_size - 1}: " in full
        assert rank["left"] == ["model"] and rank["sum"] == 200_000
