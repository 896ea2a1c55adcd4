"""Keras' optimizers in a v1 graph: the returned op takes the whole step, as SOK 1.x's did."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks.fields import KEYS, TARGETS, build, check_training

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
keras = tf.keras.optimizers

STOCK = {
    "sgd": lambda: keras.SGD(0.05),
    "momentum": lambda: keras.SGD(0.05, momentum=0.9),
    "adagrad": lambda: keras.Adagrad(0.2),
    "adam": lambda: keras.Adam(0.02),
    "schedule": lambda: keras.Adam(keras.schedules.ExponentialDecay(0.05, 2, 0.5)),
}


no_minimize = pytest.mark.skipif(is_keras_3(), reason="Keras 3 has no `minimize`")


@pytest.mark.parametrize(
    "name, by_loss",
    [*((name, False) for name in STOCK), pytest.param("adam", True, marks=no_minimize)],
)
def test_a_session_trains_tables_and_weights(sok, graph, name, by_loss):
    if name == "schedule" and not is_keras_3():
        pytest.skip("tf_keras itself reads a variable of its own before it is initialized")

    def minimize(optimizer, loss, layer, weight):
        variables = [*layer.trainable_variables, weight]
        if by_loss:
            return optimizer.minimize(loss, variables)
        gradients = tf.gradients(loss, [layer.table, weight])
        return optimizer.apply_gradients(zip(gradients, variables, strict=True))

    check_training(sok, STOCK[name], minimize)


def test_the_initializer_of_an_optimizer(sok, graph):
    init, keys, targets, loss, layer, weight = build(sok)
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
