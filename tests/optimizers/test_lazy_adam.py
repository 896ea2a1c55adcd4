"""LazyAdam in its three forms against Adam's formula on the touched rows, in float64 NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.test_rules import (
    DIM,
    KEYS,
    check,
    embedding_gradient,
    gradients,
    make_variable,
)

pytestmark = pytest.mark.keras
RATE, BETA_1, BETA_2 = 0.05, 0.8, 0.99


class Formula:
    """Kingma and Ba's Adam, rows without a gradient untouched, bias correction by all steps."""

    def __init__(self, rows, epsilon):
        self.rows, self.epsilon, self.step = rows.astype(np.float64), epsilon, 0
        self.m, self.v = np.zeros_like(self.rows), np.zeros_like(self.rows)

    def update(self, positions, values):
        self.step += 1
        total = np.zeros_like(self.rows)
        np.add.at(total, positions, values)
        at = np.unique(positions)
        self.m[at] = BETA_1 * self.m[at] + (1 - BETA_1) * total[at]
        self.v[at] = BETA_2 * self.v[at] + (1 - BETA_2) * total[at] ** 2
        rate = RATE * np.sqrt(1 - BETA_2**self.step) / (1 - BETA_1**self.step)
        self.rows[at] -= rate * self.m[at] / (np.sqrt(self.v[at]) + self.epsilon)


def forms(sok):
    keras_adam = tf.keras.optimizers.Adam(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=1e-6)
    return {
        "v1": sok.tf.keras.optimizers.LazyAdamOptimizer(RATE, BETA_1, BETA_2, 1e-6),
        "keras": sok.optimizers.LazyAdam(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=1e-6),
        "wrapped": sok.OptimizerWrapper(keras_adam, lazy=True),
    }


@pytest.mark.parametrize("form", ["v1", "keras", "wrapped"])
def test_embedding_rows(sok, form):
    variable, initial = make_variable(sok)
    optimizer, formula, seen = forms(sok)[form], Formula(initial, 1e-6), set()
    for positions, values in gradients():
        optimizer.apply_gradients([(embedding_gradient(positions, values), variable)])
        formula.update(positions, values)
        seen.update(positions.tolist())
    check(variable, formula.rows, seen)


def test_sparse_gradients_of_ordinary_variables(sok):
    rows = np.random.default_rng(0).random([len(KEYS), DIM]).astype(np.float32)
    ordinary, formula, optimizer = tf.Variable(rows), Formula(rows, 1e-6), forms(sok)["v1"]
    for positions, values in gradients():
        if len(positions):
            optimizer.apply_gradients([(tf.IndexedSlices(values, positions, rows.shape), ordinary)])
            formula.update(positions, values)
    np.testing.assert_allclose(ordinary, formula.rows, rtol=0, atol=1e-5)


def test_dense_gradients_of_ordinary_variables_follow_adam(sok):
    ours, stock = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    lazy = sok.tf.keras.optimizers.LazyAdamOptimizer(RATE)
    adam = tf.compat.v1.train.AdamOptimizer(RATE)
    for step in range(5):
        gradient = tf.constant([1.0, step - 2.0])
        lazy.apply_gradients([(gradient, ours)])
        adam.apply_gradients([(gradient, stock)])
    np.testing.assert_allclose(ours, stock, rtol=1e-6)


def test_absent_rows_keep_their_bits(sok):
    for optimizer in forms(sok).values():
        variable, _ = make_variable(sok)
        value = np.ones([1, DIM], np.float32)
        optimizer.apply_gradients([(embedding_gradient([0], value), variable)])
        before = variable.find(KEYS[:1])[0].numpy()
        for _ in range(20):
            optimizer.apply_gradients([(embedding_gradient([1], value), variable)])
        assert (variable.find(KEYS[:1])[0].numpy() == before).all()


def test_lazy_momentum_follows_the_sparse_formula(sok):
    variable, initial = make_variable(sok)
    stock = tf.keras.optimizers.SGD(RATE, momentum=0.9)
    optimizer = sok.OptimizerWrapper(stock, lazy=True)
    rows, velocity, seen = initial.astype(np.float64), np.zeros(initial.shape), set()
    for positions, values in gradients():
        optimizer.apply_gradients([(embedding_gradient(positions, values), variable)])
        total = np.zeros_like(rows)
        np.add.at(total, positions, values)
        at = np.unique(positions)
        velocity[at] = 0.9 * velocity[at] - RATE * total[at]
        rows[at] += velocity[at]
        seen.update(positions.tolist())
    check(variable, rows, seen)
