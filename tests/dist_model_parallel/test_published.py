"""Programs for DMP as they are: one id a sample, odd batches, old optimizers, set_weights first."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras


# So many that each of four ranks has an input of one id a sample: in a graph it must have one.
SIZES = [(7, 3), (5, 2), (9, 4), (4, 2), (6, 3), (3, 5), (8, 2)]
LISTS = 2  # the table whose samples are lists of ids
LOCAL = 2  # samples of a rank
RATE = 0.5


def tables():
    rng = np.random.default_rng(5)
    return [rng.normal(size=size).astype(np.float32) for size in SIZES]


def ids(world_size):
    """Ids of the global batch, table by table: one of each sample, for table `LISTS` a list."""
    rng = np.random.default_rng(6)
    found = [rng.integers(0, rows, LOCAL * world_size) for rows, _ in SIZES]
    found[LISTS] = [rng.integers(0, 9, k % 3).tolist() for k in range(LOCAL * world_size)]
    return found


def ids_oracle(world_size):
    """Outputs for the global batch, and the tables after a step, of stock TensorFlow."""
    variables, given, rows = [tf.Variable(t) for t in tables()], ids(world_size), SIZES[LISTS][0]
    counts = [np.bincount(np.array(each, int), minlength=rows) for each in given[LISTS]]
    counts = np.array(counts, np.float32)
    with tf.GradientTape() as tape:
        right = [
            counts @ table if i == LISTS else tf.gather(table, each)
            for i, (table, each) in enumerate(zip(variables, given, strict=True))
        ]
        loss = tf.add_n([tf.reduce_sum(each**2) for each in right]) / LOCAL / world_size
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
    return right, [t - RATE * g for t, g in zip(variables, gradients, strict=True)]


def check_close(found, right, atol=1e-6):
    for ours, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=atol)


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("world_size", [1, 4])
def test_one_id_a_sample_of_the_global_batch(on_threads, world_size):
    """Outside of a graph, in one, and for sparse ids; tables after a step; errors."""
    expected, trained = ids_oracle(world_size)

    def check():
        rank = comm.current().rank
        layers = [tf.keras.layers.Embedding(*SIZES[0]), *(sok.Embedding(*s) for s in SIZES[1:])]
        layers[LISTS] = sok.Embedding(*SIZES[LISTS], combiner="sum")
        layer = dmp.DistributedEmbedding(layers, dp_input=False)
        layer.set_weights(tables())
        mine, given = layer.strategy.input_ids_list[rank], ids(world_size)
        ragged = tf.ragged.constant(given[LISTS], dtype=tf.int64, row_splits_dtype=tf.int64)
        given = [ragged if i == LISTS else tf.constant(each) for i, each in enumerate(given)]
        inputs = [given[i] for i in mine]

        @tf.function
        def step(inputs):
            with tf.GradientTape() as tape:
                outputs = layer(inputs)
                loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs]) / LOCAL
            tape = dmp.DistributedGradientTape(tape)
            return outputs, tape.gradient(loss, layer.trainable_variables)

        right = [output[LOCAL * rank : LOCAL * (rank + 1)] for output in expected]
        check_close(layer(inputs), right)
        given[LISTS] = ragged.to_sparse()
        check_close(layer([given[i] for i in mine]), right)
        outputs, gradients = step(inputs)
        check_close(outputs, right)
        for gradient, variable in zip(gradients, layer.trainable_variables, strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        check_close(layer.get_weights(all_ranks=True), trained, atol=1e-5)
        # In a graph one input of two axes beside one of one axis.
        mixed = [tf.reshape(given[i], [-1, 1]) if i == 0 else given[i] for i in mine]
        if world_size > 1:
            with pytest.raises(ValueError, match="not divisible"):
                layer([each[1:] for each in inputs])
            with pytest.raises(Exception, match="numbers of axes"):
                tf.function(lambda inputs: layer(inputs))(mixed)
        first, *others = (width for _, width in SIZES)
        shapes = [tuple(output.shape) for output in layer(mixed)]
        assert shapes == [(LOCAL, 1, first), *((LOCAL, width) for width in others)]

    on_threads(world_size, check)


def old_data(world_size):
    rng = np.random.default_rng(7)
    x = [tf.constant(rng.integers(0, rows, LOCAL * world_size)) for rows, _ in SIZES]
    return x, tf.constant(rng.normal(size=[LOCAL * world_size, 1]), tf.float32)


@pytest.mark.skipif(not hasattr(tf.keras, "__internal__"), reason="Keras 3 has no old optimizers")
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_old_optimizer_of_tf_keras(on_threads, world_size):
    """Steps of tf_keras' legacy Adam through DistributedOptimizer."""
    variables = [*map(tf.Variable, tables()), tf.Variable(tf.ones([sum(w for _, w in SIZES), 1]))]
    x, y = old_data(world_size)
    optimizer = tf.keras.optimizers.legacy.Adam(0.1)
    for _ in range(2):
        with tf.GradientTape() as tape:
            rows = [tf.gather(v, each) for v, each in zip(variables, x, strict=False)]
            loss = tf.reduce_mean((tf.concat(rows, 1) @ variables[-1] - y) ** 2)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def check():
        layer = dmp.DistributedEmbedding([sok.Embedding(*size) for size in SIZES])
        head = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        inputs = [tf.keras.Input([], dtype="int64") for _ in SIZES]
        model = tf.keras.Model(inputs, head(tf.concat(layer(inputs), 1)))
        model.compile(dmp.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.1)), "mse")
        layer.set_weights(tables())
        part = slice(LOCAL * comm.current().rank, LOCAL * (comm.current().rank + 1))
        for _ in range(2):
            model.train_on_batch([each[part] for each in x], y[part])
        found = [*layer.get_weights(all_ranks=True), *head.get_weights()]
        for ours, variable in zip(found, variables, strict=True):
            np.testing.assert_allclose(ours, variable, rtol=1e-4, atol=1e-5)

    on_threads(world_size, check)


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
