"""combine, its gradient and the gradient of its weights against NumPy in float64."""

import itertools

import numpy as np
import pytest

from sok_like import _core


def divisor(combiner, weights):
    if combiner == "mean":
        return weights.sum()
    return np.sqrt((weights**2).sum()) if combiner == "sqrtn" else 1.0


def reference(rows, inverse, splits, combiner, weights):
    if combiner == "none":
        return rows[inverse] * weights[:, None]
    out = np.zeros((len(splits) - 1, rows.shape[1]))
    for s, (begin, end) in enumerate(itertools.pairwise(splits)):
        w = weights[begin:end]
        if end > begin and divisor(combiner, w) != 0:
            summed = (rows[inverse[begin:end]] * w[:, None]).sum(axis=0)
            out[s] = summed / divisor(combiner, w)
    return out


def numeric_gradient(function, x, step=1e-6):
    """Gradient of the scalar `function` by each element of the float64 array `x`."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        shifted = x.copy()
        shifted[i] += step
        above = function(shifted)
        shifted[i] -= 2 * step
        gradient[i] = (above - function(shifted)) / (2 * step)
    return gradient


def random_samples(rng, one_key_each, batch=30, num_unique=12):
    lengths = np.ones(batch, int) if one_key_each else rng.integers(0, 5, batch)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    inverse = rng.integers(0, num_unique, splits[-1]).astype(np.int32)
    return inverse, splits, rng.uniform(0.25, 2.0, splits[-1]).astype(np.float32)


@pytest.mark.parametrize("one_key_each", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 4, 7, 16])
@pytest.mark.parametrize("combiner", ["none", "sum", "mean", "sqrtn"])
def test_combine_and_gradients(combiner, dim, weighted, one_key_each):
    rng = np.random.default_rng(dim)
    inverse, splits, weights = random_samples(rng, one_key_each)
    rows = rng.normal(size=(12, dim)).astype(np.float32)
    given_splits = None if combiner == "none" else splits
    given_weights = weights if weighted else None
    w = (weights if weighted else np.ones_like(weights)).astype(np.float64)
    expected = reference(rows.astype(np.float64), inverse, splits, combiner, w)

    out = _core.combine(rows, inverse, given_splits, combiner, given_weights)
    np.testing.assert_allclose(out, expected, atol=1e-5)

    grad = rng.normal(size=out.shape).astype(np.float32)
    by_row = _core.combine_gradient(grad, inverse, given_splits, 12, combiner, given_weights)
    numeric = numeric_gradient(
        lambda x: (reference(x, inverse, splits, combiner, w) * grad).sum(),
        rows.astype(np.float64),
    )
    np.testing.assert_allclose(by_row, numeric, atol=1e-4)

    by_weight = _core.weight_gradient(rows, grad, inverse, given_splits, combiner, given_weights)
    numeric = numeric_gradient(
        lambda x: (reference(rows.astype(np.float64), inverse, splits, combiner, x) * grad).sum(),
        w,
    )
    np.testing.assert_allclose(by_weight, numeric, atol=1e-4)


@pytest.mark.parametrize("combiner", ["sum", "sqrtn"])
def test_thread_count_does_not_show(combiner):
    rng = np.random.default_rng(0)
    inverse, splits, weights = random_samples(rng, False, batch=30_000, num_unique=5000)
    grad = rng.normal(size=(30_000, 16)).astype(np.float32)
    num_threads = _core.num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            _core.set_num_threads(threads)
            results.append(_core.combine_gradient(grad, inverse, splits, 5000, combiner, weights))
    finally:
        _core.set_num_threads(num_threads)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_empty_batch():
    rows, empty = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    assert _core.combine(rows, empty, np.array([0])).shape == (0, 4)
    assert _core.combine(rows, empty, np.array([0, 0, 0]), "mean").tolist() == [[0] * 4] * 2
    assert _core.combine_gradient(np.zeros((0, 4)), empty, np.array([0]), 0).shape == (0, 4)


@pytest.mark.parametrize(
    "inverse, splits, combiner, weights, message",
    [
        ([0, 2], [0, 2], "sum", None, r"`inverse` must lie in \[0, 2\). Received: 2 at position 1"),
        ([0, -1], [0, 2], "sum", None, r"Received: -1 at position 1"),
        ([0, 1], [0, 1], "sum", None, "run from 0 to num_keys = 2"),
        ([0, 1], [0, 3, 2], "sum", None, "must ascend. Received: 3 before 2"),
        ([0, 1], None, "sum", None, "must be given with combiner 'sum'"),
        ([0, 1], [0, 2], "none", None, "must be None with combiner 'none'"),
        ([0, 1], [0, 2], "max", None, "one of none, sum, mean, sqrtn. Received: 'max'"),
        ([0, 1], [0, 2], "sum", [1.0], "`weights` must have shape"),
    ],
)
def test_errors(inverse, splits, combiner, weights, message):
    rows = np.ones((2, 3), np.float32)
    inverse = np.array(inverse, np.int32)
    splits = None if splits is None else np.array(splits)
    weights = None if weights is None else np.array(weights, np.float32)
    with pytest.raises(ValueError, match=message):
        _core.combine(rows, inverse, splits, combiner, weights)
