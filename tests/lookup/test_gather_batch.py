"""Rows of all ranks' batches: values, gradients, and a model against one process."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.gathered import ROWS, SIZES, WEIGHTS

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_rows_and_gradients(rank_results, world_size):
    total = sum(SIZES[:world_size])
    gradient = 2 * WEIGHTS[:world_size, :total].sum(0) * ROWS[:total]  # of the sum of all losses
    for rank, found in enumerate(rank_results(world_size, "gathered.rows")):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        for name, near in (("float32", 1e-6), ("bfloat16", 0.05)):
            for how in ("eager", "function"):
                rows, back = found[f"{how} {name}"]
                np.testing.assert_allclose(rows, ROWS[:total], rtol=near / 2, atol=near)
                np.testing.assert_allclose(back, gradient[mine], rtol=near, atol=near)
        expected = [n + 10 * r for r in range(world_size) for n in range(SIZES[r])]
        assert found["integers"].tolist() == expected


@pytest.mark.ranks
def test_a_model_of_two_towers_is_that_of_one_process(rank_results):
    (alone,) = rank_results(1, "gathered.trained")
    for found in rank_results(2, "gathered.trained"):
        for name, values in alone.items():
            for mine, theirs in zip(found[name], values, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5, err_msg=name)


def test_refused(sok):
    with pytest.raises(ValueError, match="scalar"):
        sok.gather_batch(3.0)
    for wrong in (tf.constant(["a"]), tf.constant([True])):
        with pytest.raises(TypeError, match="must hold numbers"):
            sok.gather_batch(wrong)
