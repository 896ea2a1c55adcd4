"""Rows of all ranks' batches: values and gradients."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras

SIZES = (3, 1, 2)  # batches of the ranks
WEIGHTS = np.random.default_rng(1).normal(size=[3, 6, 2]).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=[6, 2]).astype(np.float32)


def check():
    """What every rank gathers, and its gradient, eagerly and in a function, in two dtypes."""
    rank, world_size = sok.rank(), sok.size()
    mine, total = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1])), sum(SIZES[:world_size])
    gradient = 2 * WEIGHTS[:world_size, :total].sum(0) * ROWS[:total]  # of the sum of all losses

    def step(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            whole = sok.gather_batch(rows)
            loss = tf.reduce_sum(tf.cast(WEIGHTS[rank, :total], whole.dtype) * whole**2)
        return whole, tape.gradient(loss, rows)

    for dtype, near in ((tf.float32, 1e-6), (tf.bfloat16, 0.05)):
        for run in (step, tf.function(step)):
            rows, back = (tf.cast(t, tf.float32) for t in run(tf.cast(ROWS[mine], dtype)))
            np.testing.assert_allclose(rows, ROWS[:total], rtol=near / 2, atol=near)
            np.testing.assert_allclose(back, gradient[mine], rtol=near, atol=near)
    integers = sok.gather_batch(tf.range(SIZES[rank]) + 10 * rank).numpy().tolist()
    assert integers == [n + 10 * r for r in range(world_size) for n in range(SIZES[r])]


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_and_gradients(on_threads, world_size):
    on_threads(world_size, check)


@pytest.mark.ranks
def test_ranks_that_are_processes(on_processes):
    on_processes(2, check)


def test_refused(sok):
    with pytest.raises(ValueError, match="scalar"):
        sok.gather_batch(3.0)
    for wrong in (tf.constant(["a"]), tf.constant([True])):
        with pytest.raises(TypeError, match="must hold numbers"):
            sok.gather_batch(wrong)
