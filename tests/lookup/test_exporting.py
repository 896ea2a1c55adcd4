"""Lookups of a graph in an export: made together where their keys are known, with the same rows."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.lookup.exporting import exporting
from sok_like.lookup.hash_lookup import HashFeature, lookup
from tests.lookup.test_stock_table import export_of, stock_of

RANDOM = np.random.default_rng(3)
KEYS = np.arange(40)


def rows(variable, keys, combiner="none"):
    splits = None if combiner == "none" else tf.range(0, tf.size(keys, tf.int64) + 1, 2)
    (found,) = lookup([HashFeature(variable, keys, combiner, splits)], training=False)
    return found


def number_in(found):
    """Keys of rows."""
    return tf.cast(tf.abs(found[:, 0]) * 30, tf.int64)


@pytest.fixture
def tables(sok):
    """Three tables, with keys of their own, and what stands for them."""
    made = [sok.EmbeddingVariable(dim, name=f"together_{dim}") for dim in (6, 4, 5)]
    stock, _ = stock_of(sok, made, [KEYS, KEYS + 7, KEYS[::2]])
    return made, export_of(stock, *made)


def traced(compute, what):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def served(keys):
        with exporting(what) as results:
            results.append(compute(keys))
            return results[0]

    return served.get_concrete_function()


def lookups(function):
    """How many there are in the graph itself: each compares the first buckets of its keys."""
    return [op.type for op in function.graph.get_operations()].count("PopulationCount")


def test_lookups_of_a_graph_are_one_lookup(tables):
    (first, second, third), what = tables

    def compute(keys):
        by_first = rows(first, keys)
        again = rows(first, keys[::-1], "mean")
        by_rows = rows(third, number_in(by_first))
        one_by_one = tf.map_fn(lambda key: rows(second, key[tf.newaxis])[0], keys, tf.float32)
        return by_first, again, rows(second, keys + 3, "sum"), by_rows, one_by_one, keys

    function = traced(compute, what)
    assert lookups(function) == 2  # by_rows comes after by_first
    for size in (2, 30):
        keys = tf.constant(RANDOM.integers(0, 60, size))
        for found, expected in zip(function(keys), compute(keys), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_lookup_whose_rows_nobody_needs_is_left_out(tables):
    (first, second, third), what = tables

    def compute(keys):
        rows(third, number_in(rows(second, keys)))
        tf.debugging.assert_all_finite(rows(first, keys), "an effect")
        return keys + 1

    function = traced(compute, what)
    assert lookups(function) == 1
    assert function(tf.constant([5], tf.int64)).numpy().tolist() == [6]
    assert [v.shape[1] for v in function.graph.variables if v.name.startswith("rows")] == [6]


def test_a_graph_that_changes_variables_keeps_the_order_of_its_lookups(tables):
    (first, second, _), what = tables
    last = tf.Variable(tf.zeros([2], tf.int64))

    def compute(keys):
        by_first = rows(first, keys)
        last.assign(number_in(by_first))
        return by_first, rows(second, last.read_value())

    keys = tf.constant([3, 11], tf.int64)
    expected = compute(keys)
    last.assign([0, 0])
    function = traced(compute, what)
    assert lookups(function) == 2
    for found, known in zip(function(keys), expected, strict=True):
        np.testing.assert_array_equal(found, known)
