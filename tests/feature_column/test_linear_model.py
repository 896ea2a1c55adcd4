"""`linear_model` over columns with keys, and weights `[num_ids, 1]`, against stock columns."""

import numpy as np
import pytest
import tensorflow as tf

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


@pytest.mark.parametrize("combiner, with_stock", [("sum", True), ("mean", False)])
def test_linear_model(sok, combiner, with_stock):
    def columns(make):
        weighted = v1.feature_column.weighted_categorical_column(make("b"), "weight")
        others = [v1.feature_column.numeric_column("price"), stock("a")] if with_stock else []
        return [make("a") if not others else weighted, *others][:3]

    def ours(key):
        return sok.feature_column.categorical_column_with_embedding(key, tf.int64)

    def build(function):
        return lambda given, made: function(
            given, made, units=2, sparse_combiner=combiner, cols_to_vars=held
        )

    held = {}
    found = train(sok, build(sok.feature_column.linear_model), lambda: columns(ours))
    assert {"bias"} < held.keys() and any(c in held for c in columns(ours)[:1])
    right = train(sok, build(v1.feature_column.linear_model), lambda: columns(stock))
    assert np.abs(right[-1] - right[0]).max() > 0.1
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_after_install_under_its_stock_name(sok):
    sok.deeprec.install()
    try:
        fc = v1.feature_column
        found = train(
            sok, fc.linear_model, lambda: [fc.categorical_column_with_embedding("a", tf.int64)]
        )
    finally:
        sok.deeprec.uninstall()
    right = train(sok, v1.feature_column.linear_model, lambda: [stock("a")])
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_in_the_order_of_the_ids(sok, combiner):
    def columns(fc, make):
        weighted = v1.feature_column.weighted_categorical_column(make("a"), "weight")
        initializer = v1.constant_initializer(0.5)
        return lambda: [fc.embedding_column(weighted, 3, combiner, initializer)]

    ours = columns(
        sok.feature_column,
        lambda key: sok.feature_column.categorical_column_with_embedding(key, tf.int64),
    )
    found = train(sok, sok.feature_column.input_layer, ours)
    right = train(sok, v1.feature_column.input_layer, columns(v1.feature_column, stock))
    assert np.abs(right[-1] - right[0]).max() > 0.1
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_weight_too_few(sok):
    with tf.Graph().as_default(), v1.Session() as session:
        keys = sok.feature_column.categorical_column_with_embedding("a", tf.int64)
        weighted = v1.feature_column.weighted_categorical_column(keys, "weight")
        column = sok.feature_column.embedding_column(weighted, 3)
        weights = v1.placeholder_with_default(WEIGHTS[:-1], [None, 1])
        given = {**features(), "weight": weights}
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            output = sok.feature_column.input_layer(given, [column])
            session.run(v1.global_variables_initializer())
            session.run(output)
