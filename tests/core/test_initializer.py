"""Initial rows: distributions and purity. Published answers: cpp/tests/initializer_test.cc."""

import math

import numpy as np
import pytest

from sok_like import _core


def rows_of(num_keys=50_000, dim=16, **options):
    table = _core.Table(options.pop("name", "t"), dim, **options)
    return table.initial_rows(np.arange(num_keys) * 2 - num_keys)


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


# a, b, mean, standard deviation, range and distribution function in closed form
IN_TWO = normal_cdf(2) - normal_cdf(-2)
TRUNCATED = 2 * math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / IN_TWO)
CASES = {
    "uniform": (-1.0, 3.0, 1.0, 4 / math.sqrt(12), (-1, 3), lambda x: (x + 1) / 4),
    "normal": (1.0, 2.0, 1.0, 2.0, (-11, 13), lambda x: normal_cdf((x - 1) / 2)),
    "truncated_normal": (
        *(1.0, 2.0, 1.0, TRUNCATED, (-3, 5)),
        lambda x: (normal_cdf((x - 1) / 2) - normal_cdf(-2)) / IN_TWO,
    ),
}


@pytest.mark.parametrize("initializer", sorted(CASES))
def test_distribution(initializer):
    a, b, mean, stddev, (low, high), cdf = CASES[initializer]
    rows = rows_of(initializer=initializer, a=a, b=b)
    values = rows.astype(np.float64).ravel()
    n = values.size
    assert low <= values.min() and values.max() < high
    if initializer != "normal":  # the range is used up to its ends
        assert values.min() < low + 1e-3 and values.max() > high - 1e-3
    assert abs(values.mean() - mean) < 5 * stddev / math.sqrt(n)
    assert abs(values.std() / stddev - 1) < 5 / math.sqrt(n)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by chance once in a thousand seeds.
    values.sort()
    at = np.linspace(0, n - 1, 2000).astype(int)
    expected = np.array([cdf(x) for x in values[at]])
    assert np.abs((at + 0.5) / n - expected).max() < 1.95 / math.sqrt(n)
    # Neither columns nor keys may go together.
    correlation = np.corrcoef(rows.astype(np.float64).T) - np.eye(rows.shape[1])
    assert np.abs(correlation).max() < 6 / math.sqrt(len(rows))
    neighbours = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(n)


@pytest.mark.parametrize("initializer", sorted(CASES))
def test_row_depends_on_seed_name_key_and_column_alone(core, initializer):
    a, b = CASES[initializer][:2]
    options = {"initializer": initializer, "a": a, "b": b, "seed": 11}
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    wide = _core.Table("t", 37, **options).initial_rows(keys)
    for dim in (1, 3, 4, 16, 36):
        np.testing.assert_array_equal(core.Table("t", dim, **options).find(keys)[0], wide[:, :dim])
    table = core.Table("t", 37, **options)
    order = np.random.default_rng(1).permutation(keys.size)
    for part in np.array_split(order, 7):
        np.testing.assert_array_equal(table.find_or_insert(keys[part])[0], wide[part])
    np.testing.assert_array_equal(table.find(keys)[0], wide)
    for other in ({"seed": 12}, {"name": "u"}):
        assert np.mean(rows_of(100, 4, **{**options, **other}) == rows_of(100, 4, **options)) < 0.01


def test_default_rows_are_taken_by_key_modulo_their_number(core):
    default_rows = np.arange(21, dtype=np.float32).reshape(7, 3)
    table = core.Table("t", 3, initializer="default_rows", default_rows=default_rows)
    keys = np.array([0, 6, 7, 123456789, -1, -(2**63)])
    expected = default_rows[[int(k) % 2**64 % 7 for k in keys]]
    np.testing.assert_array_equal(table.find(keys)[0], expected)
    np.testing.assert_array_equal(table.find_or_insert(keys)[0], expected)
