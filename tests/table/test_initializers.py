"""Keras initializers as distributions of rows: moments and bounds against Keras' own."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.table.options import row_initializer
from sok_like.table.policies import DEFAULT_VALUE_DIM as NUM_DEFAULT_ROWS

pytestmark = pytest.mark.keras
init, v1 = tf.keras.initializers, tf.compat.v1
DIM, NUM_ROWS = 16, 4000
DISTRIBUTIONS = {
    "random_uniform": lambda: init.RandomUniform(),
    "uniform": lambda: init.RandomUniform(-2.0, 3.0),
    "random_normal": lambda: init.RandomNormal(),
    "normal": lambda: init.RandomNormal(1.0, 0.5),
    "truncated_normal": lambda: init.TruncatedNormal(-1.0, 2.0),
    "glorot_uniform": lambda: init.GlorotUniform(),
    "glorot_normal": lambda: init.GlorotNormal(),
    "he_uniform": lambda: init.HeUniform(),
    "he_normal": lambda: init.HeNormal(),
    "variance_scaling": lambda: init.VarianceScaling(3.0, "fan_out", "untruncated_normal"),
    "v1 random_uniform": lambda: v1.random_uniform_initializer(),
    "v1 truncated_normal": lambda: v1.truncated_normal_initializer(0.5, 0.25),
    "v1 glorot_uniform": lambda: v1.glorot_uniform_initializer(),
    "v1 variance_scaling": lambda: v1.variance_scaling_initializer(2.0, "fan_avg", "uniform"),
    "v2 random_normal": lambda: tf.random_normal_initializer(1.0, 2.0),
}


def rows_of(sok, initializer, dim=DIM, capacity=NUM_ROWS, name="t", keys=None):
    variable = sok.EmbeddingVariable(dim, name=name, initializer=initializer, capacity=capacity)
    return variable.find(np.arange(NUM_ROWS) if keys is None else keys)[0].numpy()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_moments_and_bounds_are_those_of_keras(sok, name):
    tf.keras.utils.set_random_seed(1)  # the outermost of Keras' own values are as they fall
    rows = rows_of(sok, DISTRIBUTIONS[name]()).ravel()
    expected = np.asarray(DISTRIBUTIONS[name]()((NUM_ROWS, DIM))).ravel()
    spread = expected.std()
    assert abs(rows.mean() - expected.mean()) < 0.03 * spread
    assert abs(rows.std() - spread) < 0.02 * spread
    for quantile in (0.0, 0.05, 0.25, 0.75, 0.95, 1.0):
        room = 0.05 if 0 < quantile < 1 else (0.01 if np.abs(rows).max() < 2.1 * spread else 1.0)
        assert abs(np.quantile(rows, quantile) - np.quantile(expected, quantile)) < room * spread


def test_the_default_is_uniform_in_a_twentieth(sok):
    layer = sok.All2AllDenseEmbedding(None, DIM, 1, 1, dynamic_input=True)
    rows = layer(tf.range(NUM_ROWS, dtype=tf.int64), training=False).numpy()
    assert -0.05 <= rows.min() < -0.0499
    assert 0.0499 < rows.max() <= 0.05


@pytest.mark.parametrize(
    "initializer, value",
    [
        ("zeros", 0),
        ("ones", 1),
        (lambda: init.Constant(2.5), 2.5),
        (lambda: init.Zeros(), 0),
        (lambda: v1.constant_initializer(1.5), 1.5),
        (lambda: tf.ones_initializer(), 1),
    ],
)
def test_constants(sok, initializer, value):
    initializer = initializer if isinstance(initializer, str) else initializer()
    assert (rows_of(sok, initializer) == value).all()


def test_names_classes_and_instances_are_one(sok):
    rows = [rows_of(sok, i) for i in ("random_uniform", init.RandomUniform, init.RandomUniform())]
    assert (rows[0] == rows[1]).all()
    assert (rows[0] == rows[2]).all()


def test_without_bound_the_fan_in_is_the_width():
    bounded, unbounded = (row_initializer("he_uniform", 16, n) for n in (1600, None))
    assert np.isclose(unbounded.b, bounded.b * 10)


# ---- initializers that do not draw element by element ----


def ramp(shape, dtype=None):
    return tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape)


def test_initializers_of_tf1_draw_each_row():
    every = [v1.truncated_normal_initializer(), v1.zeros_initializer(), tf.ones_initializer()]
    kinds = [row_initializer(initializer, 4, None).kind for initializer in every]
    assert kinds == ["truncated_normal", "constant", "constant"]


@pytest.mark.parametrize("initializer", [ramp, lambda: init.Orthogonal(), lambda: init.Identity()])
def test_default_rows_come_around(sok, initializer):
    initializer = initializer if initializer is ramp else initializer()
    keys = np.array([0, 5, NUM_DEFAULT_ROWS - 1, NUM_DEFAULT_ROWS + 5, 2**40 * NUM_DEFAULT_ROWS])
    rows = rows_of(sok, initializer, dim=4, capacity=None, keys=keys)
    if initializer is ramp:
        whole = np.arange(NUM_DEFAULT_ROWS * 4, dtype=np.float32).reshape(-1, 4)
        assert (rows == whole[keys % NUM_DEFAULT_ROWS]).all()
    assert (rows[1] == rows[3]).all()
    assert (rows[0] == rows[4]).all()
    assert np.isfinite(rows).all()


def test_default_rows_without_a_seed_are_the_same_every_time(sok):
    assert (rows_of(sok, init.Orthogonal(), 4) == rows_of(sok, init.Orthogonal(), 4)).all()


def test_an_initializer_that_returns_another_shape(sok):
    with pytest.raises(ValueError, match=r"must return the shape it is asked for, \(4096, 4\)"):
        rows_of(sok, lambda shape, dtype=None: tf.zeros([3, 4]), dim=4)


def test_no_initializer(sok):
    for make in (
        lambda: sok.EmbeddingVariable(2, name="t", initializer=None),
        lambda: sok.HashEmbedding(2, embeddings_initializer=None).build(),
        lambda: sok.GroupEmbedding({"t": 2}, table_options={"t": {"initializer": None}}),
    ):
        with pytest.raises(ValueError, match="`initializer` must be a Keras .*initializer=None"):
            make()
    with pytest.raises(ValueError, match="no_such"):
        rows_of(sok, "no_such")
