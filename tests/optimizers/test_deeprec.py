"""DeepRec's optimizers on tables and on ordinary variables, against NumPy, in v1 graphs."""

import numpy as np
import pytest
import tensorflow as tf

from tests.core import oracles

v1 = tf.compat.v1
KEYS = [[0, 1, 1, 4], [1, 2], [0, 4, 4, 2], [3], [1, 3, 0], [0, 2, 4], [1], [0, 1, 2, 3, 4]]
WIDTH, RATE = 3, 0.1


def optimizers():
    """Name: what makes the optimizer from the global step, and the oracle of rows."""
    from sok_like.optimizers import deeprec

    decay = {"initial_accumulator": 0.3, "decay_steps": 2, "decay_rate": 0.5}
    args = {
        "initial_accumulator_value": 0.3,
        "accumulator_decay_step": 2,
        "accumulator_decay_rate": 0.5,
    }
    adam = {"lazy": True, "epsilon": 1e-8}
    return {
        "decay": (
            lambda step: deeprec.AdagradDecayOptimizer(RATE, step, **args),
            lambda w: oracles.AdagradDecay(w, **decay),
        ),
        "decay_v2": (
            lambda step: deeprec.AdagradDecayOptimizerV2(RATE, step, **args),
            lambda w: oracles.AdagradDecay(w, **decay),
        ),
        "async": (
            lambda step: deeprec.AdamAsyncOptimizer(RATE),
            lambda w: oracles.Adam(w, **adam),
        ),
        "rmsprop": (
            lambda step: deeprec.AdamAsyncOptimizer(
                RATE, 0.6, 0.9, 1e-3, apply_sparse_rmsprop=True
            ),
            lambda w: oracles.Rmsprop(w, 0.6, 0.9, 1e-3),
        ),
        "adamw": (
            lambda step: deeprec.AdamWOptimizer(0.2, RATE),
            lambda w: oracles.Adam(w, row_weight_decay=0.2, **adam),
        ),
    }


class VariableAdamW(oracles.Adam):
    """Ordinary variables decay by the number alone, without the rate."""

    def update(self, t, lr, g, touched):
        self.w[touched] *= 1 - 0.2
        super().update(t, lr, g, touched)


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


def expected(rows, make_oracle):
    oracle, found = make_oracle(rows), [rows]
    for number, (batch, gradient) in enumerate(steps(), 1):
        oracle.step(number, RATE, batch, gradient)
        found.append(oracle.w.copy())
    return found


@pytest.mark.parametrize("name", ["decay", "decay_v2", "async", "rmsprop", "adamw"])
@pytest.mark.parametrize("kind", ["table", "resource", "reference"])
def test_rows_follow_the_formula(sok, name, kind):
    make_optimizer, make_oracle = optimizers()[name]
    if name == "adamw" and kind != "table":

        def make_oracle(w):
            return VariableAdamW(w, lazy=True, epsilon=1e-8)

    with tf.Graph().as_default():
        if kind == "table":
            variable = sok.EmbeddingVariable(WIDTH, name="t", initializer="random_uniform")
        else:
            initial = np.random.default_rng(1).normal(size=[5, WIDTH]).astype(np.float32)
            variable = v1.get_variable("v", initializer=initial, use_resource=kind == "resource")
        found = train(variable, make_optimizer)
    assert np.abs(found[-1] - found[0]).max() > 0.05
    for ours, right in zip(found, expected(found[0], make_oracle), strict=True):
        np.testing.assert_allclose(ours, right, rtol=0, atol=2e-6)


DENSE = {
    "decay": lambda w: oracles.AdagradDecay(w, 0.3, 2, 0.5),
    "async": lambda w: oracles.Adam(w, epsilon=1e-8),
    "rmsprop": lambda w: oracles.Adam(w, beta_1=0.6, beta_2=0.9, epsilon=1e-3),
    "adamw": lambda w: VariableAdamW(w, epsilon=1e-8),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_gradients_move_every_element(sok, name):
    make_optimizer, _ = optimizers()[name]
    with tf.Graph().as_default():
        initial = np.random.default_rng(1).normal(size=[5, WIDTH]).astype(np.float32)
        found = train(v1.get_variable("v", initializer=initial), make_optimizer, gather=False)
    oracle = DENSE[name](initial)
    for number, (batch, gradient) in enumerate(steps(), 1):
        g, _ = oracles.batch_gradient(5, WIDTH, batch, gradient)
        # Of a dense gradient every row is touched, by zeros, too.
        oracle.update(number, RATE, g, np.ones(5, bool))
        np.testing.assert_allclose(found[number], oracle.w, rtol=0, atol=2e-6)


def test_decays_go_by_the_global_step(sok):
    """One that nobody counts on asks for no decay; one that starts late asks at once."""
    from sok_like.optimizers.deeprec import AdagradDecayOptimizer

    def rows(first, counted):
        with tf.Graph().as_default(), v1.Session() as session:
            table = sok.EmbeddingVariable(1, name="t", initializer="zeros")
            step = v1.get_variable("step", initializer=np.int64(first), trainable=False)
            optimizer = AdagradDecayOptimizer(RATE, step, 1.0, 3, 0.5)
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))
            update = optimizer.minimize(loss, global_step=step if counted else None)
            session.run(v1.global_variables_initializer())
            for _ in range(4):
                session.run(update)
            return session.run(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))[0, 0]

    def right(times):
        accumulator, row, decays = 1.0, 0.0, 0
        for time in times:
            if time // 3 > decays:
                accumulator, decays = max(accumulator * 0.5, 1.0), decays + 1
            accumulator += 1
            row -= RATE / np.sqrt(accumulator)
        return row

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
    from sok_like.optimizers.deeprec import AdagradDecayOptimizer

    with pytest.raises(ValueError, match=message):
        AdagradDecayOptimizer(0.1, tf.Variable(0), **options)
