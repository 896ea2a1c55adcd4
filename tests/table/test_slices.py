"""Slices of tables, against NumPy's own marks of the elements that they contain."""

import numpy as np
import tensorflow as tf

from sok_like.table.slices import HeldSlice, TableSlice

SHAPE = 7, 5


def marked(part):
    whole = np.zeros(SHAPE, bool)
    whole[part.slices] = True
    return whole


def any_slice(rng):
    bounds = [sorted(rng.integers(0, length + 1, 2).tolist()) for length in SHAPE]
    return TableSlice(*(tuple(ends) for ends in zip(*bounds, strict=True)))


def test_what_two_slices_have_in_common():
    rng, values = np.random.default_rng(4), np.arange(35).reshape(SHAPE)
    for _ in range(200):
        one, other = any_slice(rng), any_slice(rng)
        both = marked(one) & marked(other)
        common = one.common(other)
        assert (common.size, marked(common).tolist()) == (both.sum(), both.tolist())
        assert one.shape == values[one.slices].shape
        if common.size:
            found = values[other.slices][common.slices_in(other)]
            np.testing.assert_array_equal(found, values[both].reshape(common.shape))


def test_parts_by_rows_have_bounds_that_all_slices_share():
    parts = TableSlice((2, 1), (7, 4)).by_rows(3)
    assert [*parts] == [TableSlice((a, 1), (b, 4)) for a, b in ((2, 3), (3, 6), (6, 7))]
    assert [*TableSlice((2, 0), (2, 5)).by_rows(3)] == []


def test_rows_that_a_variable_holds_behind_others():
    held = HeldSlice(TableSlice((2, 1), (5, 4)), tf.Variable(tf.zeros([9, 3])), 4)
    rows = held.place.rows(3, 5)
    held.write(rows, [[1, 2, 3], [4, 5, 6]])
    assert held.read(rows).numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.flatnonzero(held.variable.numpy().any(1)).tolist() == [5, 6]
