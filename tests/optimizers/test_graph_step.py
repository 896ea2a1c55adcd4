"""Keras' optimizers in a v1 graph: the returned op takes the whole step, as SOK 1.x's did."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks.fields import KEYS, TARGETS, batch, build

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
keras = tf.keras.optimizers
UNIQUE = np.unique(KEYS)
STEPS = 6


STOCK = {
    "sgd": lambda: keras.SGD(0.05),
    "momentum": lambda: keras.SGD(0.05, momentum=0.9),
    "adagrad": lambda: keras.Adagrad(0.2),
    "adam": lambda: keras.Adam(0.02),
    "schedule": lambda: keras.Adam(keras.schedules.ExponentialDecay(0.05, 2, 0.5)),
}


def train(init, keys, targets, op, layer, weight):
    """Rows of all keys before and after, and the weight after some runs of `op`."""
    read = layer.table.find(tf.constant(UNIQUE))[0]
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        initial = session.run(read)
        for step in range(STEPS):
            batch_keys, batch_targets = batch(step)
            session.run(op, {keys: batch_keys, targets: batch_targets})
        return initial, session.run(read), session.run(weight)


def stock(make, initial):
    """The same with a dense table, dense gradients and the stock optimizer, eagerly."""
    table, weight = tf.Variable(initial), tf.Variable(tf.ones([6]))
    optimizer = make()
    for step in range(STEPS):
        batch_keys, batch_targets = batch(step)
        numbers = np.searchsorted(UNIQUE, batch_keys)
        with tf.GradientTape() as tape:
            rows = tf.reshape(tf.gather(table, numbers), [-1, 6])
            loss = tf.reduce_mean((tf.linalg.matvec(rows, weight) - batch_targets) ** 2)
        pairs = zip(tape.gradient(loss, [table, weight]), [table, weight], strict=True)
        pairs = [(tf.convert_to_tensor(gradient), variable) for gradient, variable in pairs]
        optimizer.apply_gradients(pairs)
    return table.numpy(), weight.numpy()


no_minimize = pytest.mark.skipif(is_keras_3(), reason="Keras 3 has no `minimize`")


@pytest.mark.parametrize(
    "name, by_loss",
    [*((name, False) for name in STOCK), pytest.param("adam", True, marks=no_minimize)],
)
def test_a_session_trains_tables_and_weights(sok, graph, name, by_loss):
    if name == "schedule" and not is_keras_3():
        pytest.skip("tf_keras itself reads a variable of its own before it is initialized")
    init = sok.Init(global_batch_size=4, seed=2)
    keys, targets, loss, layer, weight = build(sok)
    variables = [*layer.trainable_variables, weight]
    optimizer = sok.OptimizerWrapper(STOCK[name]())
    if by_loss:
        op = optimizer.minimize(loss, variables)
    else:
        gradients = tf.gradients(loss, [layer.table, weight])
        op = optimizer.apply_gradients(zip(gradients, variables, strict=True))
    initial, rows, trained = train(init, keys, targets, op, layer, weight)
    with context.eager_mode():  # outside the graph that the fixture is building
        expected, expected_weight = stock(STOCK[name], initial)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trained, expected_weight, rtol=0, atol=1e-5)
    assert np.abs(rows - initial).max() > 0.01


def test_the_initializer_of_an_optimizer(sok, graph):
    init = sok.Init(global_batch_size=4, seed=2)
    keys, targets, loss, layer, weight = build(sok)
    gradients = tf.gradients(loss, [layer.table, weight])
    optimizer = sok.tf.keras.optimizers.Adam(0.02)
    variables = [*layer.trainable_variables, weight]
    op = optimizer.apply_gradients(zip(gradients, variables, strict=True))
    with v1.Session() as session:
        session.run(init)
        session.run([weight.initializer, layer.table.initializer])
        missing = session.run(v1.report_uninitialized_variables())
        assert len(missing) >= 3  # step, moments of the weight
        session.run(optimizer.initializer)
        assert session.run(v1.report_uninitialized_variables()).tolist() == []
        session.run(op, {keys: KEYS, targets: TARGETS})
        # Adam's first step is the learning rate, whatever the gradient.
        np.testing.assert_allclose(np.abs(session.run(weight) - 1.0), 0.02, rtol=0.02)
