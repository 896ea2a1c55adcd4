"""LazyAdam in its three forms, and lazy momentum, against the core's oracles."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.core import oracles
from tests.optimizers.test_rules import (
    DIM,
    KEYS,
    follow,
    gradients,
    of_oracle,
)

pytestmark = pytest.mark.keras
RATE, BETA_1, BETA_2 = 0.05, 0.8, 0.99
ORACLE = functools.partial(oracles.Adam, beta_1=BETA_1, beta_2=BETA_2, epsilon=1e-6, lazy=True)


def forms(sok):
    keras_adam = tf.keras.optimizers.Adam(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=1e-6)
    return {
        "v1": sok.tf.keras.optimizers.LazyAdamOptimizer(RATE, BETA_1, BETA_2, 1e-6),
        "keras": sok.optimizers.LazyAdam(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=1e-6),
        "wrapped": sok.OptimizerWrapper(keras_adam, lazy=True),
    }


@pytest.mark.parametrize("form", ["v1", "keras", "wrapped"])
def test_embedding_rows(sok, form):
    follow(sok, forms(sok)[form], of_oracle(ORACLE, RATE))


def test_sparse_gradients_of_ordinary_variables(sok):
    rows = np.random.default_rng(0).random([len(KEYS), DIM]).astype(np.float32)
    ordinary, oracle, optimizer = tf.Variable(rows), ORACLE(rows), forms(sok)["v1"]
    batches = [batch for batch in gradients() if len(batch[0])]
    for step, (positions, values) in enumerate(batches, 1):
        optimizer.apply_gradients([(tf.IndexedSlices(values, positions, rows.shape), ordinary)])
        oracle.step(step, RATE, positions, values)
    np.testing.assert_allclose(ordinary, oracle.w, rtol=0, atol=1e-5)


def test_dense_gradients_of_ordinary_variables_follow_adam(sok):
    ours, stock = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    lazy = sok.tf.keras.optimizers.LazyAdamOptimizer(RATE)
    adam = tf.compat.v1.train.AdamOptimizer(RATE)
    for step in range(5):
        gradient = tf.constant([1.0, step - 2.0])
        lazy.apply_gradients([(gradient, ours)])
        adam.apply_gradients([(gradient, stock)])
    np.testing.assert_allclose(ours, stock, rtol=1e-6)


def test_lazy_momentum_follows_the_sparse_formula(sok):
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE, momentum=0.9), lazy=True)
    lazy = functools.partial(oracles.Momentum, momentum=0.9, lazy=True)
    follow(sok, optimizer, of_oracle(lazy, RATE))
