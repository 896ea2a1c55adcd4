"""Rows of all ranks' batches: values and gradients."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras

SIZES = (3, 1, 2)  # batches of the ranks
WEIGHTS = np.random.default_rng(1).normal(size=[3, 6, 2]).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=[6, 2]).astype(np.float32)


def gathered():
    """What every rank gathers, and its gradient, eagerly and in a function, in two dtypes."""
    rank, world_size = sok.rank(), sok.size()
    start = sum(SIZES[:rank])
    mine = ROWS[start : start + SIZES[rank]]
    total = sum(SIZES[:world_size])

    def step(mine):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            whole = sok.gather_batch(mine)
            loss = tf.reduce_sum(tf.cast(WEIGHTS[rank, :total], whole.dtype) * whole**2)
        return whole, tape.gradient(loss, mine)

    found = {}
    for dtype in (tf.float32, tf.bfloat16):
        given = tf.cast(mine, dtype)
        for name, run in (("eager", step), ("function", tf.function(step))):
            found[f"{name} {dtype.name}"] = [
                tf.cast(tensor, tf.float32).numpy() for tensor in run(given)
            ]
    found["integers"] = sok.gather_batch(tf.range(SIZES[rank]) + 10 * rank).numpy()
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_rows_and_gradients(on_threads, world_size):
    total = sum(SIZES[:world_size])
    gradient = 2 * WEIGHTS[:world_size, :total].sum(0) * ROWS[:total]  # of the sum of all losses
    for rank, found in enumerate(on_threads(world_size, gathered)):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        for name, near in (("float32", 1e-6), ("bfloat16", 0.05)):
            for how in ("eager", "function"):
                rows, back = found[f"{how} {name}"]
                np.testing.assert_allclose(rows, ROWS[:total], rtol=near / 2, atol=near)
                np.testing.assert_allclose(back, gradient[mine], rtol=near, atol=near)
        expected = [n + 10 * r for r in range(world_size) for n in range(SIZES[r])]
        assert found["integers"].tolist() == expected


@pytest.mark.ranks
def test_ranks_that_are_processes(on_processes):
    """Negatives of the global batch, whose gradients come back to the rank of their sample."""
    results = on_processes(2, gathered)
    gradient = 2 * WEIGHTS[:2, :4].sum(0) * ROWS[:4]
    for found, mine in zip(results, (slice(0, 3), slice(3, 4)), strict=True):
        rows, back = found["function float32"]
        np.testing.assert_allclose(rows, ROWS[:4], rtol=1e-6)
        np.testing.assert_allclose(back, gradient[mine], rtol=1e-6)


def test_refused(sok):
    with pytest.raises(ValueError, match="scalar"):
        sok.gather_batch(3.0)
    for wrong in (tf.constant(["a"]), tf.constant([True])):
        with pytest.raises(TypeError, match="must hold numbers"):
            sok.gather_batch(wrong)
