"""DeepRec's optimizers on tables and on ordinary variables, against NumPy, in v1 graphs."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.optimizers import deeprec
from tests.core import oracles

v1 = tf.compat.v1
KEYS = [[0, 1, 1, 4], [1, 2], [0, 4, 4, 2], [3], [1, 3, 0], [0, 2, 4], [1], [0, 1, 2, 3, 4]]
WIDTH, RATE = 3, 0.1


DECAY = {
    "initial_accumulator_value": 0.3,
    "accumulator_decay_step": 2,
    "accumulator_decay_rate": 0.5,
}
OPTIMIZERS = {  # from the global step
    "decay": lambda step: deeprec.AdagradDecayOptimizer(RATE, step, **DECAY),
    "decay_v2": lambda step: deeprec.AdagradDecayOptimizerV2(RATE, step, **DECAY),
    "async": lambda step: deeprec.AdamAsyncOptimizer(RATE),
    "rmsprop": lambda step: deeprec.AdamAsyncOptimizer(
        RATE, 0.6, 0.9, 1e-3, apply_sparse_rmsprop=True
    ),
    "adamw": lambda step: deeprec.AdamWOptimizer(0.2, RATE),
}


class VariableAdamW(oracles.Adam):
    """Ordinary variables decay by the number alone, without the rate."""

    def update(self, t, lr, g, touched):
        self.w[touched] *= 1 - 0.2
        super().update(t, lr, g, touched)


def oracle_of(name, kind, rows):
    """Of a table, of a variable with sparse gradients, or of one with dense ones."""
    is_lazy = kind != "dense"
    if name.startswith("decay"):
        return oracles.AdagradDecay(rows, 0.3, 2, 0.5)
    if name == "rmsprop":
        return (oracles.Rmsprop if is_lazy else oracles.Adam)(rows, 0.6, 0.9, 1e-3)
    if name == "async":
        return oracles.Adam(rows, epsilon=1e-8, lazy=is_lazy)
    if kind == "table":
        return oracles.Adam(rows, epsilon=1e-8, lazy=True, row_weight_decay=0.2)
    return VariableAdamW(rows, epsilon=1e-8, lazy=is_lazy)


def train(variable, make_optimizer, gather=True):
    """Rows 0 to 4 after each step, in a session."""
    step = v1.train.get_or_create_global_step()
    keys, rates = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, WIDTH])
    rows = tf.nn.embedding_lookup(variable, keys) if gather else tf.gather(variable * 1.0, keys)
    optimizer = make_optimizer(step)
    update = optimizer.minimize(tf.reduce_sum(rows * rates), global_step=step)
    every = tf.nn.embedding_lookup(variable, tf.range(5, dtype=tf.int64))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        found = [session.run(every)]
        for batch, gradient in steps():
            session.run(update, {keys: batch, rates: gradient})
            found.append(session.run(every))
    return found


def steps():
    rng = np.random.default_rng(3)
    for batch in KEYS:
        yield np.array(batch), rng.normal(size=[len(batch), WIDTH]).astype(np.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["table", "resource", "reference", "dense"])
def test_rows_follow_the_formula(sok, name, kind):
    initial = np.random.default_rng(1).normal(size=[5, WIDTH]).astype(np.float32)
    with tf.Graph().as_default():
        if kind == "table":
            variable = sok.EmbeddingVariable(WIDTH, name="t", initializer="random_uniform")
        else:
            variable = v1.get_variable("v", initializer=initial, use_resource=kind != "reference")
        found = train(variable, OPTIMIZERS[name], gather=kind != "dense")
    assert np.abs(found[-1] - found[0]).max() > 0.05
    oracle = oracle_of(name, kind, found[0])
    for number, (batch, gradient) in enumerate(steps(), 1):
        if kind == "dense":  # it touches every row, by zeros, too
            batch, gradient = np.r_[batch, :5], np.r_[gradient, np.zeros([5, WIDTH])]
        oracle.step(number, RATE, batch, gradient)
        np.testing.assert_allclose(found[number], oracle.w, rtol=0, atol=2e-6)


def test_decays_go_by_the_global_step(sok):
    """One that nobody counts on asks for no decay; one that starts late asks at once."""

    def rows(first, counted):
        with tf.Graph().as_default(), v1.Session() as session:
            table = sok.EmbeddingVariable(1, name="t", initializer="zeros")
            step = v1.get_variable("step", initializer=np.int64(first), trainable=False)
            optimizer = deeprec.AdagradDecayOptimizer(RATE, step, 1.0, 3, 0.5)
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))
            update = optimizer.minimize(loss, global_step=step if counted else None)
            session.run(v1.global_variables_initializer())
            for _ in range(4):
                session.run(update)
            return session.run(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))[0, 0]

    def right(times):
        oracle = oracles.AdagradDecay([[0.0]], 1.0, 3, 0.5)
        for time in times:
            oracle.step(time, RATE, [0], [[1.0]])
        return oracle.w[0, 0]

    np.testing.assert_allclose(rows(0, counted=True), right([1, 2, 3, 4]), atol=1e-6)
    np.testing.assert_allclose(rows(0, counted=False), right([1, 1, 1, 1]), atol=1e-6)
    np.testing.assert_allclose(rows(8, counted=True), right([9, 10, 11, 12]), atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"initial_accumulator_value": 0.0}, "`initial_accumulator_value` must be positive"),
        ({"accumulator_decay_step": 0}, "`accumulator_decay_step` must be a positive whole"),
        ({"accumulator_decay_step": 0.5}, "a positive whole number. Received: .*=0.5"),
        ({"accumulator_decay_step": 1.5}, "a positive whole number. Received: .*=1.5"),
        ({"accumulator_decay_rate": 1.0}, r"`accumulator_decay_rate` must be in \(0, 1\)"),
    ],
)
def test_what_cannot_be_honoured_raises(sok, options, message):
    with pytest.raises(ValueError, match=message):
        deeprec.AdagradDecayOptimizer(0.1, tf.Variable(0), **options)
