"""Programs for DMP as they are: one id a sample, odd batches, old optimizers, set_weights first."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from tests.dist_model_parallel import published_checks
from tests.dist_model_parallel.published_checks import LISTS, LOCAL, RATE, SIZES
from tests.dist_model_parallel.worlds import each_world
from tests.ranks import run_ranks

pytestmark = pytest.mark.keras


@pytest.fixture(scope="module")
def of_tf_keras():
    """`of_tf_keras(ranks, check)`: what ranks under tf_keras found; one launch for all checks."""

    @functools.cache
    def launched(world_size):
        target = "tests.dist_model_parallel.published_checks:published"
        return run_ranks(target, world_size, env={"TF_USE_LEGACY_KERAS": "1"})

    return lambda world_size, check: [rank[check] for rank in launched(world_size)]


more_ranks = pytest.mark.parametrize("world_size", [3, 4])


@each_world
def test_one_id_a_sample_of_the_global_batch(rank_results, world_size):
    is_one_id_a_sample(rank_results(world_size, "dmp.one_id_a_sample"), world_size)


@pytest.mark.slow
@pytest.mark.ranks
@more_ranks
def test_one_id_a_sample_on_more_ranks_of_tf_keras(of_tf_keras, world_size):
    is_one_id_a_sample(of_tf_keras(world_size, "one_id_a_sample"), world_size)


def is_one_id_a_sample(results, world_size):
    tables = [tf.Variable(table) for table in published_checks.tables()]
    ids = published_checks.ids(world_size)
    rows = SIZES[LISTS][0]
    counts = [np.bincount(np.array(each, int), minlength=rows) for each in ids[LISTS]]
    counts = np.array(counts, np.float32)
    with tf.GradientTape() as tape:
        right = [
            counts @ table if i == LISTS else tf.gather(table, each)
            for i, (table, each) in enumerate(zip(tables, ids, strict=True))
        ]
        loss = tf.add_n([tf.reduce_sum(each**2) for each in right]) / LOCAL / world_size
    gradients = tape.gradient(loss, tables)
    for rank, seen in enumerate(results):
        mine = slice(LOCAL * rank, LOCAL * (rank + 1))
        for way in ("eager", "graph", "sparse"):
            for found, expected in zip(seen[way], right, strict=True):
                np.testing.assert_allclose(found, expected[mine], rtol=1e-5, atol=1e-6)
        for found, table, gradient in zip(seen["tables"], tables, gradients, strict=True):
            expected = table - RATE * tf.convert_to_tensor(gradient)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        if world_size > 1:
            is_value_error, text = seen["odd"]
            assert is_value_error
            assert "not divisible" in text
            assert "numbers of axes" in seen["mixed"][1]
        first, *others = (width for _, width in SIZES)
        assert seen["mixed eager"] == [(LOCAL, 1, first), *((LOCAL, width) for width in others)]


@each_world
def test_an_old_optimizer_of_tf_keras(rank_results, world_size):
    if not hasattr(tf.keras, "__internal__"):
        pytest.skip("Keras 3 has no legacy optimizers")
    is_legacy_adam(rank_results(world_size, "dmp.old_optimizer"), world_size)


@pytest.mark.slow
@pytest.mark.ranks
@more_ranks
def test_an_old_optimizer_on_more_ranks_of_tf_keras(of_tf_keras, world_size):
    is_legacy_adam(of_tf_keras(world_size, "old_optimizer"), world_size)


def is_legacy_adam(results, world_size):
    import tf_keras

    variables = [tf.Variable(table) for table in published_checks.tables()]
    variables.append(tf.Variable(tf.ones([sum(width for _, width in SIZES), 1])))
    optimizer = tf_keras.optimizers.legacy.Adam(0.1)
    x, y = published_checks.old_data(world_size)
    for _ in range(2):
        with tf.GradientTape() as tape:
            rows = [tf.gather(v, each) for v, each in zip(variables, x, strict=False)]
            loss = tf.reduce_mean((tf.concat(rows, 1) @ variables[-1] - y) ** 2)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    for found in results:
        for value, variable in zip(found, variables, strict=True):
            np.testing.assert_allclose(value, variable, rtol=1e-4, atol=1e-5)


TABLE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
CASES = [
    (None, [0, 1, 0], [[1, 2], [3, 4], [1, 2]]),
    (None, [[0, 1], [2, 0]], [[[1, 2], [3, 4]], [[5, 6], [1, 2]]]),
    ("sum", [[0, 1], [2, 0]], [[4, 6], [6, 8]]),
    ("mean", [[[0, 1], [2, 0], [1, 2]]], [[[2, 3], [3, 4], [4, 5]]]),
]


@pytest.mark.parametrize("combiner, ids, expected", CASES)
@pytest.mark.parametrize("given", ["set_weights", "argument"])
def test_weights_of_a_layer_that_was_never_called(combiner, ids, expected, given):
    weights = {"weights": [TABLE]} if given == "argument" else {}
    layer = sok.Embedding(3, 2, combiner=combiner, name="early", **weights)
    ids = np.array(ids, np.int64)
    model = tf.keras.Sequential([layer])
    if not hasattr(tf.keras, "__internal__"):  # Keras 3 takes inputs for float32 otherwise
        model = tf.keras.Sequential([tf.keras.Input(ids.shape[1:], dtype="int64"), layer])
    if not weights:
        layer.set_weights([TABLE])
    np.testing.assert_array_equal(model(tf.constant(ids)), expected)
    np.testing.assert_array_equal(tf.function(layer)(tf.constant(ids)), expected)
    np.testing.assert_array_equal(model.predict(ids, verbose=0), expected)
    assert "weights" not in layer.get_config()
    with pytest.raises(ValueError):
        layer.set_weights([TABLE[:2]])


def test_features_of_one_id_in_one_table():
    layer = dmp.ConcatOneHotEmbedding([3, 5, 7, 11], 3)
    rows = np.arange(78, dtype=np.float32).reshape(26, 3)
    layer.set_weights([rows])
    ids = tf.constant([[1, 2, 3, 4], [2, 4, 6, 10]])
    with tf.GradientTape() as tape:
        out = layer(ids)
    np.testing.assert_array_equal(out, rows[[[1, 5, 11, 19], [2, 7, 14, 25]]])
    (gradient,) = tape.gradient(out, layer.trainable_weights)
    assert int(tf.reduce_sum(tf.convert_to_tensor(gradient))) == 24
    copy = dmp.ConcatOneHotEmbedding.from_config(layer.get_config())
    assert copy(ids).shape == (2, 4, 3)
    # Of the next feature's rows, and read without a word if nobody looked.
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 1.*id 5"):
        layer(tf.constant([[0, 5, 0, 0]]))
    with pytest.raises(ValueError, match=r"must be \[batch, 4\]"):
        layer(tf.constant([[0, 1]]))
    with pytest.raises(ValueError, match="feature_sizes"):
        dmp.ConcatOneHotEmbedding([], 3)


class OwnLayer(tf.keras.layers.Layer):
    """A layer of the user's, which takes no initializer."""

    def __init__(self, input_dim, output_dim, **kwargs):
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = input_dim, output_dim

    def build(self, _):
        self.params = self.add_weight(name="params", shape=(self.input_dim, self.output_dim))

    def get_config(self):
        return {"input_dim": self.input_dim, "output_dim": self.output_dim}


def test_layers_of_the_users_own_share_a_weight():
    layer = dmp.DistributedEmbedding([OwnLayer(3, 2), OwnLayer(4, 2)])
    tables = [np.arange(6, dtype=np.float32).reshape(3, 2), -np.ones([4, 2], np.float32)]
    layer.set_weights(tables)
    outputs = layer([tf.constant([2]), tf.constant([3])])
    np.testing.assert_array_equal(outputs[0], [[4, 5]])
    np.testing.assert_array_equal(outputs[1], [[-1, -1]])
    assert len(layer.weights) == 1
