"""combine, its gradient and the gradient of its weights against NumPy in float64."""

import itertools

import numpy as np
import pytest

from sok_like import _core

NUM_UNIQUE = 12


def shares(inverse, splits, combiner, weights, num_unique=NUM_UNIQUE):
    """[samples, unique rows]: what each row has in each sample."""
    if combiner == "none":
        splits = np.arange(len(inverse) + 1)
    found = np.zeros((len(splits) - 1, num_unique))
    for s, (begin, end) in enumerate(itertools.pairwise(splits)):
        w = weights[begin:end]
        divisor = {"mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}.get(combiner, 1.0)
        if divisor != 0:
            np.add.at(found[s], inverse[begin:end], w / divisor)
    return found


def weight_gradient(loss, weights, step=1e-6):
    """Of each weight: the change of loss(weights), in float64."""
    shifts = step * np.eye(len(weights))
    return np.array([loss(weights + s) - loss(weights - s) for s in shifts]) / (2 * step)


@pytest.mark.parametrize("one_key_each", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 4, 7, 16])
@pytest.mark.parametrize("combiner", ["none", "sum", "mean", "sqrtn"])
def test_combine_and_gradients(core, combiner, dim, weighted, one_key_each):
    rng = np.random.default_rng(dim)
    lengths = np.ones(60, int) if one_key_each else rng.integers(0, 5, 60)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    inverse = rng.integers(0, NUM_UNIQUE, splits[-1]).astype(np.int32)
    inverse[::3] = 7  # a row whose sum goes over several tiles on a device
    weights = rng.uniform(0.25, 2.0, splits[-1]).astype(np.float32)
    rows = rng.normal(size=(NUM_UNIQUE, dim)).astype(np.float32)
    given_splits = None if combiner == "none" else splits
    given_weights = weights if weighted else None
    w = (weights if weighted else np.ones_like(weights)).astype(np.float64)
    share = shares(inverse, splits, combiner, w)

    out = core.combine(rows, inverse, given_splits, combiner, given_weights)
    np.testing.assert_allclose(out, share @ rows, atol=1e-5)

    grad = rng.normal(size=out.shape).astype(np.float32)
    by_row = core.combine_gradient(grad, inverse, given_splits, NUM_UNIQUE, combiner, given_weights)
    np.testing.assert_allclose(by_row, share.T @ grad, atol=2e-5)

    by_weight = _core.weight_gradient(rows, grad, inverse, given_splits, combiner, given_weights)
    expected = weight_gradient(
        lambda x: (shares(inverse, splits, combiner, x) @ rows * grad).sum(), w
    )
    np.testing.assert_allclose(by_weight, expected, atol=1e-4)


def test_empty_batch(core):
    rows, empty = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    assert core.combine(rows, empty, np.array([0])).shape == (0, 4)
    assert core.combine(rows, empty, np.array([0, 0, 0]), "mean").tolist() == [[0] * 4] * 2
    assert core.combine_gradient(np.zeros((0, 4)), empty, np.array([0]), 0).shape == (0, 4)


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
