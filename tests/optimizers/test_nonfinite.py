"""Gradients that are not finite: what they spoil, and that they can be skipped."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training import apply_gradient

pytestmark = pytest.mark.keras
v1 = tf.compat.v1

OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.5),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.5),
    "v1 adam": lambda: v1.train.AdamOptimizer(0.5),
}
KEYS = [1, 2, 3, 4]


def trained(sok, optimizer, gradients, function, name):
    """Rows of KEYS after a step with each of the gradients `[num_keys, 2]`."""
    table = sok.EmbeddingVariable(2, name=name)
    sok.assign(table, KEYS, np.ones([4, 2]))

    def step(values, keys):
        optimizer.apply_gradients([(tf.IndexedSlices(values, keys), table)])

    step = tf.function(step) if function else step
    for values, keys in gradients:
        step(tf.constant(values, tf.float32), tf.constant(keys, tf.int64))
    return table, table.find(KEYS)[0].numpy()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adagrad", "Adam", "Ftrl"])
def test_what_is_not_finite_spoils_elements_as_on_a_dense_variable(sok, name):
    optimizers = tf.keras.optimizers
    make = getattr(optimizers, name, lambda rate: optimizers.SGD(rate, momentum=0.9))
    dense, table = tf.Variable(tf.ones([1, 4])), sok.EmbeddingVariable(4, initializer="ones")
    stock, wrapped = make(0.5), sok.OptimizerWrapper(make(0.5))
    for gradient in ([NAN, INF, -INF, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0]):
        stock.apply_gradients([(tf.constant([gradient]), dense)])
        apply_gradient(wrapped, table, [7], [gradient])
    row = table.find([7])[0].numpy()
    expected = dense.numpy()
    if name == "SGD":  # tf_keras keeps a momentum of 0 times infinity, which is NaN
        expected[0, 1:3] = row[0, 1:3]
    np.testing.assert_allclose(row, expected, rtol=1e-4)
    spoiled = [-INF, INF] if name in ("SGD", "momentum") else [NAN, NAN]
    np.testing.assert_array_equal(row[0, :3], [NAN, *spoiled])
    assert np.isfinite(row[0, 3])


STEPS = [
    ([[1, 2], [NAN, 1], [3, 4], [1, -INF]], [1, 2, 3, 4]),
    ([[1, 1], [1, 1], [NAN, 1]], [1, 2, 2]),  # the parts of key 2 count together
    ([[1, 2], [2, 1]], [4, 4]),
]
FINITE = [  # the same without the keys whose sums are not finite
    ([[1, 2], [3, 4]], [1, 3]),
    ([[1, 1]], [1]),
    ([[1, 2], [2, 1]], [4, 4]),
]


@pytest.mark.parametrize(
    "name, function", [("sgd", True), ("sgd", False), ("adagrad", True), ("v1 adam", False)]
)
def test_skipped_keys_are_as_if_absent_and_are_counted(sok, name, function):
    wrapped = sok.OptimizerWrapper(OPTIMIZERS[name](), skip_nonfinite_gradients=True)
    table, found = trained(sok, wrapped, STEPS, function, "poisoned")
    assert int(wrapped.skipped_gradients(table)) == 3
    plain = sok.OptimizerWrapper(OPTIMIZERS[name]())
    _, expected = trained(sok, plain, FINITE, function, "clean")
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)


def test_skipping_is_off_by_default(sok):
    plain = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    table, found = trained(sok, plain, STEPS[:1], False, "poisoned")
    assert np.isnan(found[1]).any()
    with pytest.raises(ValueError, match="skip_nonfinite_gradients=True"):
        plain.skipped_gradients(table)


def test_skipping_in_a_session(sok):
    with tf.Graph().as_default(), v1.Session() as session:
        session.run(sok.Init(global_batch_size=12, seed=7))
        table = sok.EmbeddingVariable(1, name="poisoned", initializer="ones")
        wrapped = sok.OptimizerWrapper(
            v1.train.GradientDescentOptimizer(0.5), skip_nonfinite_gradients=True
        )
        values = tf.constant([[1.0], [NAN]])
        slices = tf.IndexedSlices(values, tf.constant([1, 2], tf.int64))
        sok_rows = [table.find([1, 2])[0]]
        insert = sok.assign(table, [1, 2], [[1.0], [1.0]])
        step = wrapped.apply_gradients([(slices, table)])
        count = wrapped.skipped_gradients(table)
        session.run(v1.global_variables_initializer())
        session.run(insert)
        session.run(step)
        session.run(step)
        assert session.run(count) == 2
        assert session.run(sok_rows)[0].tolist() == [[0.0], [1.0]]
