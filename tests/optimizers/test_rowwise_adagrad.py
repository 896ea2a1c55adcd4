"""RowWiseAdagrad against its formula in NumPy, for tables and ordinary variables."""

import numpy as np
import pytest
import tensorflow as tf

from tests.core import oracles
from tests.optimizers.test_rules import (
    KEYS,
    STEPS,
    embedding_gradient,
    follow,
    make_variable,
    of_oracle,
)

pytestmark = pytest.mark.keras
RATE, START, EPSILON = 0.05, 0.2, 1e-3


def make(sok, **kwargs):
    return sok.optimizers.RowWiseAdagrad(RATE, START, EPSILON, **kwargs)


def oracle(rows):
    return oracles.RowWiseAdagrad(rows, START, EPSILON)


def test_rows_of_a_table(sok):
    optimizer = make(sok)
    slots = follow(sok, optimizer, of_oracle(oracle, RATE)).snapshot()
    assert slots.slot_widths.numpy().tolist() == [1]  # a third of Adam's, at three floats per row
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("shape", [[5], [5, 3], [5, 2, 3]])
@pytest.mark.parametrize("sparse", [False, True])
def test_ordinary_variables(sok, shape, sparse):
    """One accumulator per row, whatever its axes."""
    rng, optimizer = np.random.default_rng(5), make(sok)
    start = rng.normal(size=shape).astype(np.float32)
    variable, formula = tf.Variable(start), oracle(start.reshape(5, -1))
    step = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, variable)]))
    for number in range(1, 5):
        positions = rng.integers(0, 5, 7)
        values = rng.normal(size=[7, *shape[1:]]).astype(np.float32)
        formula.step(number, RATE, positions, values.reshape(7, -1))
        gradient = tf.IndexedSlices(*map(tf.constant, (values, positions, shape)))
        step(gradient if sparse else tf.convert_to_tensor(gradient))
    np.testing.assert_allclose(variable, formula.w.reshape(shape), rtol=1e-5, atol=1e-6)


def test_in_compile_saved_and_loaded(sok, tmp_path):
    data = {"k": KEYS[:4]}, np.arange(4, dtype=np.float32)[:, np.newaxis]
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([], dtype="int64", name="k")
    rows = sok.GroupEmbedding({"k": 3}, name="rows")({"k": keys})["k"]
    model = tf.keras.Model({"k": keys}, tf.keras.layers.Dense(1, name="top")(rows))
    model.compile(make(sok), "mse")
    model.fit(*data, batch_size=4, epochs=2, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is sok.optimizers.RowWiseAdagrad
    assert loaded.optimizer.epsilon == EPSILON
    for each in (model, loaded):  # with the accumulators: one step alone would differ
        each.fit(*data, batch_size=4, verbose=0)
    for mine, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        mine, theirs = getattr(mine, "rows", mine), getattr(theirs, "rows", theirs)
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_settings_that_tables_cannot_follow(sok):
    variable, _ = make_variable(sok)
    optimizer = sok.optimizers.RowWiseAdagrad(clipnorm=1.0)
    with pytest.raises(ValueError, match="clipnorm"):
        optimizer.apply_gradients([(embedding_gradient([0], np.ones([1, 3])), variable)])
