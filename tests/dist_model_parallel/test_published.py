"""Programs for DMP as they are: its user guide's, old optimizers, set_weights first."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras

TABLE_SIZES = [(40, 4), (9, 4), (3, 4)]
STEPS, LOCAL_BATCH = 3, 5
OPTIMIZERS = {
    "guide": lambda: tf.keras.optimizers.SGD(0.5),
    "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.1),  # of tf_keras
}


def make_model(table_sizes):
    class MyEmbeddingModel(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding_layers = [tf.keras.layers.Embedding(*size) for size in table_sizes]
            # add this line to wrap list of embedding layers used in the model
            self.embedding_layers = dmp.DistributedEmbedding(self.embedding_layers)
            self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            # embedding_outputs = [e(i) for e, i in zip(self.embedding_layers, inputs)]
            embedding_outputs = self.embedding_layers(inputs)
            return self.head(tf.concat(embedding_outputs, axis=1))

    return MyEmbeddingModel()


def make_training_step(model, loss, opt):
    @tf.function
    def training_step(inputs, labels, first_batch):
        with tf.GradientTape() as tape:
            probs = model(inputs)
            loss_value = loss(labels, probs)

        # Change Horovod Gradient Tape to dmp tape
        # tape = hvd.DistributedGradientTape(tape)
        tape = dmp.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905

        if first_batch:
            # Change Horovod broadcast_variables to dmp's
            # hvd.broadcast_variables(model.variables, root_rank=0)
            dmp.broadcast_variables(model.variables, root_rank=0)
        return loss_value

    return training_step


def tables():
    rng = np.random.default_rng(21)
    return [rng.normal(size=size).astype(np.float32) for size in TABLE_SIZES]


def samples(step, rank):
    """A rank's batch: ids `[batch]` of each table, labels `[batch, 1]`."""
    rng = np.random.default_rng([22, step, rank])
    ids = [rng.integers(0, rows, LOCAL_BATCH) for rows, _ in TABLE_SIZES]
    return ids, rng.normal(size=[LOCAL_BATCH, 1]).astype(np.float32)


def trained_on_one_process(optimizer, world_size):
    """The guide's model with plain variables, on the samples of all ranks."""
    head = [tf.Variable(tf.ones([12, 1])), tf.Variable([0.0])]
    variables = [*map(tf.Variable, tables()), *head]
    for step in range(STEPS):
        parts = [samples(step, rank) for rank in range(world_size)]
        labels = np.concatenate([labels for _, labels in parts])
        ids = [np.concatenate([ids[i] for ids, _ in parts]) for i in range(len(TABLE_SIZES))]
        with tf.GradientTape() as tape:
            rows = [tf.gather(table, own) for table, own in zip(variables, ids, strict=False)]
            loss = tf.reduce_mean((tf.concat(rows, 1) @ head[0] + head[1] - labels) ** 2)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_programs_train_as_one_process_does(on_threads, name, world_size):
    if name == "legacy" and not hasattr(tf.keras, "__internal__"):
        pytest.skip("Keras 3 has no old optimizers")
    expected = trained_on_one_process(OPTIMIZERS[name](), world_size)

    def check():
        rank, model = comm.current().rank, make_model(TABLE_SIZES)
        model([tf.constant(ids) for ids in samples(0, rank)[0]])
        model.embedding_layers.set_weights(tables())
        opt, loss = OPTIMIZERS[name](), tf.keras.losses.MeanSquaredError()
        if name == "legacy":
            opt = dmp.DistributedOptimizer(opt)
            model.compile(opt, loss)
        training_step = make_training_step(model, loss, opt)
        for step in range(STEPS):
            ids, labels = samples(step, rank)
            if name == "legacy":
                model.train_on_batch(ids, labels)
            else:
                training_step([tf.constant(x) for x in ids], tf.constant(labels), step == 0)
        found = [*model.embedding_layers.get_weights(all_ranks=True), *model.head.get_weights()]
        for ours, right in zip(found, expected, strict=True):
            # Values grow to thousands, and TensorFlow adds in another order on other processors.
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)

    on_threads(world_size, check)


TABLE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
CASES = [
    (None, [0, 1, 0], [[1, 2], [3, 4], [1, 2]]),
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


class Biased(OwnLayer):
    def build(self, _):
        super().build(_)
        self.bias = self.add_weight(name="bias", shape=(self.output_dim,))


def test_layers_of_the_users_own_share_a_weight():
    layer = dmp.DistributedEmbedding([OwnLayer(3, 2), OwnLayer(4, 2)])
    tables = [np.arange(6, dtype=np.float32).reshape(3, 2), -np.ones([4, 2], np.float32)]
    layer.set_weights(tables)
    outputs = layer([tf.constant([2]), tf.constant([3])])
    np.testing.assert_array_equal(outputs[0], [[4, 5]])
    np.testing.assert_array_equal(outputs[1], [[-1, -1]])
    assert len(layer.weights) == 1
    with pytest.raises(ValueError, match="must have one weight, its table. Received: 2 weights"):
        dmp.DistributedEmbedding([Biased(4, 2)]).set_weights([np.zeros([4, 2])])
