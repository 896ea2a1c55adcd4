"""`linear_model` over columns with keys, and weights `[num_ids, 1]`, against stock columns."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like import feature_column

v1 = tf.compat.v1
SHAPE = [5, 5]
INDICES = [[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 3], [4, 4]]
IDS = [1, 3, 2, 3, 4, 5, 3]
WEIGHTS = [[2.0], [5.0], [4.0], [8.0], [3.0], [1.0], [2.5]]


def features():
    ids = tf.SparseTensor(INDICES, tf.constant(IDS, tf.int64), SHAPE)
    price = tf.constant([[1.0], [2.0], [0.5], [0.0], [3.0]])
    return {"a": ids, "b": ids, "price": price, "weight": tf.constant(WEIGHTS)}


def train(sok, build, columns):
    """Outputs of four steps in a session."""
    with tf.Graph().as_default(), v1.Session() as session:
        outputs = build(features(), columns())
        optimizer = sok.OptimizerWrapper(v1.train.AdagradOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum((outputs - 0.7) ** 2))
        session.run(v1.global_variables_initializer())
        return [session.run([outputs, step])[0] for _ in range(4)]


def stock(key):
    return v1.feature_column.categorical_column_with_identity(key, 6)


def keys(key):
    return feature_column.categorical_column_with_embedding(key, tf.int64)


def compare(found, right, atol):
    assert np.abs(right[-1] - right[0]).max() > 0.1
    np.testing.assert_allclose(found, right, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "combiner, with_stock, installed",
    [("sum", True, False), ("mean", False, False), ("sum", False, True)],
)
def test_linear_model(sok, combiner, with_stock, installed):
    """By its own name, and after `install` by the stock one."""

    def columns(make):
        weighted = v1.feature_column.weighted_categorical_column(make("b"), "weight")
        others = [v1.feature_column.numeric_column("price"), stock("a")] if with_stock else []
        return [make("a") if not others else weighted, *others]

    def build(function):
        return lambda given, made: function(
            given, made, units=2, sparse_combiner=combiner, cols_to_vars=held
        )

    held = {}
    try:
        if installed:
            sok.deeprec.install()
        function = (v1 if installed else sok).feature_column.linear_model
        found = train(sok, build(function), lambda: columns(keys))
    finally:
        sok.deeprec.uninstall()
    assert {"bias"} < held.keys() and any(c in held for c in columns(keys)[:1])
    right = train(sok, build(v1.feature_column.linear_model), lambda: columns(stock))
    compare(found, right, 1e-6)


def test_collections(sok):
    with tf.Graph().as_default():
        keys = sok.feature_column.categorical_column_with_embedding("a", tf.int64)
        columns = [keys, v1.feature_column.numeric_column("price")]
        sok.feature_column.linear_model(features(), columns, weight_collections=["mine"])
        names = {variable.name for variable in v1.get_collection("mine")}
        assert names == {variable.name for variable in v1.global_variables()} and len(names) == 3


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_in_the_order_of_the_ids(sok, combiner):
    def columns(fc, make):
        weighted = v1.feature_column.weighted_categorical_column(make("a"), "weight")
        initializer = v1.constant_initializer(0.5)
        return lambda: [fc.embedding_column(weighted, 3, combiner, initializer)]

    found = train(sok, feature_column.input_layer, columns(feature_column, keys))
    right = train(sok, v1.feature_column.input_layer, columns(v1.feature_column, stock))
    compare(found, right, 1e-5)


def test_a_weight_too_few(sok):
    with tf.Graph().as_default(), v1.Session() as session:
        weighted = v1.feature_column.weighted_categorical_column(keys("a"), "weight")
        weights = v1.placeholder_with_default(WEIGHTS[:-1], [None, 1])
        columns = [feature_column.embedding_column(weighted, 3)]
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            output = feature_column.input_layer({**features(), "weight": weights}, columns)
            session.run(v1.global_variables_initializer())
            session.run(output)
