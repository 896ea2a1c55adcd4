"""Variables that layers assign: ranks that differ in them raise, and right programs pass."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.thread_ranks import raised
from tests.training import train_step

pytestmark = pytest.mark.keras
STEPS, BATCH, LAYERS = 4, 4, tf.keras.layers


class Center(LAYERS.Layer):
    """Subtracts a moving mean of its own."""

    def build(self, shape):
        self.mean = self.make([shape[-1]])

    def make(self, shape):
        return self.add_weight(name="mean", shape=shape, initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs - self.mean


class PlainVariable(Center):
    def make(self, shape):
        return tf.Variable(tf.zeros(shape), trainable=False, name="mean")


class OwnCall(LAYERS.BatchNormalization):
    """Nothing averages the statistics of a subclass with another `call`."""

    def call(self, inputs, training=None, mask=None):
        moving = self.moving_mean
        if training:
            moving.assign(0.9 * moving + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs - moving


def model_of(*layers, ending=tf.keras.Model):
    """A table and, beside it, these layers on numbers."""
    keys, numbers = tf.keras.Input([1], dtype="int64"), tf.keras.Input([3])
    table = sok.All2AllDenseEmbedding(
        None, 2, 1, 1, dynamic_input=True, name="rows", gradient_scale="mean"
    )
    rows = table(LAYERS.Flatten()(keys)[:, 0])
    joined = LAYERS.Concatenate()([rows, *(layer(numbers) for layer in layers)])
    outputs = LAYERS.Dense(1, kernel_initializer="ones", name="head")(joined)
    return ending([keys, numbers], outputs)


def samples(steps=STEPS):
    """Of this rank alone."""
    rng = np.random.default_rng(sok.rank())
    keys = rng.integers(0, 9, [BATCH * steps, 1])
    numbers = rng.normal(sok.rank(), 1, [BATCH * steps, 3]).astype(np.float32)
    return [keys, numbers], np.ones([BATCH * steps, 1], np.float32)


def fit(model):
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    inputs, targets = samples()
    model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)


def loop(model, compiled):
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    def step(*inputs):
        def loss_of():
            return tf.reduce_mean(tf.square(model(list(inputs), training=True) - 1.0))

        train_step(optimizer, model.trainable_variables, loss_of)

    step, (inputs, _) = tf.function(step) if compiled else step, samples()
    for batch in zip(*(np.split(values, STEPS) for values in inputs), strict=True):
        step(*map(tf.constant, batch))


WAYS = {
    "fit": fit,
    "eager": lambda model: loop(model, False),
    "graph": lambda model: loop(model, True),
}


@pytest.mark.parametrize(
    "kind, way", [*((Center, way) for way in WAYS), (PlainVariable, "fit"), (OwnCall, "eager")]
)
def test_statistics_of_the_own_rank_raise(on_threads, kind, way):
    def check():
        layer = kind(name="center")
        words = "(?s)variable '.*mean.* of layer 'center'.*average.*de_local = True"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            WAYS[way](model_of(layer))

    on_threads(2, check)


def test_a_model_without_tables_raises_in_fit(on_threads):
    def check():
        model = tf.keras.Sequential([Center(name="center"), LAYERS.Dense(1, name="head")])
        model.build([None, 3])
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
        model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
        (_, numbers), targets = samples()
        with pytest.raises(tf.errors.InvalidArgumentError, match="mean.*of layer 'center'"):
            model.fit(numbers, targets, batch_size=BATCH, verbose=0)

    on_threads(2, check)


def under_a_distribution(kind):
    with sok.distribution.DataParallel().scope():
        model = tf.keras.Sequential([kind(name="center"), LAYERS.Dense(1, name="head")])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        numbers = np.random.default_rng(0).normal(size=[BATCH * STEPS, 3])
        model.fit(numbers, np.ones([len(numbers), 1]), batch_size=BATCH, verbose=0)


@pytest.mark.ranks
def test_under_a_distribution(on_processes):
    """A rank's layer sees its own samples of a batch; batch normalization sees all."""
    on_processes(2, under_a_distribution, LAYERS.BatchNormalization)
    for error, message in on_processes(2, error_under_a_distribution):
        assert error == "InvalidArgumentError" and "of layer 'center'" in message


def error_under_a_distribution():
    return raised(lambda: under_a_distribution(Center))


class Marked(Center):
    def make(self, shape):
        mean = super().make(shape)
        mean.de_local = True
        return mean


class States(Center):
    stateful = True  # as Keras' recurrent layers say that they hold states of samples


class Counting(LAYERS.Layer):
    """With a metric of its own."""

    def __init__(self):
        super().__init__()
        self.seen = tf.keras.metrics.Mean()

    def call(self, inputs):
        self.seen.update_state(inputs)
        return inputs


class Same(Center):
    """Its statistic is the same on all ranks."""

    def call(self, inputs, training=None):
        return super().call(tf.ones_like(inputs), training=training)


class Alternating(tf.keras.Model):
    """Applies the sum of two steps' gradients, which it holds in variables of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.head = self.get_layer("head")
        self.sums = self.add_weight(shape=[5, 1], initializer="zeros", trainable=False, name="sums")
        self.twice = tf.Variable(tf.zeros([1]), trainable=False)

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(inputs, training=True) - targets))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.sums.assign_add(gradients[-2])
        self.twice.assign_add(gradients[-1])
        gradients[-2:] = tf.identity(self.sums), tf.identity(self.twice)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def spectral():
    inner = LAYERS.Dense(2, kernel_initializer="ones")
    layer = LAYERS.SpectralNormalization(inner)
    layer.build([None, 3])
    layer.set_weights([np.ones_like(weight) for weight in layer.get_weights()])
    return layer


def right_layers():
    """Whose variables may differ over ranks, or are kept alike."""
    return [
        Marked(),
        Same(),
        Counting(),
        LAYERS.BatchNormalization(),
        LAYERS.BatchNormalization(center=False, scale=False),
        LAYERS.Dropout(0.5),
        LAYERS.GaussianNoise(0.5),
        spectral(),
        States(),
        LAYERS.Dense(2, trainable=False, kernel_initializer="ones"),
    ]


@pytest.mark.parametrize(
    "way", ["fit", "eager", pytest.param("graph", marks=pytest.mark.keras(slow=True))]
)
def test_right_programs_pass(on_threads, way):
    on_threads(2, lambda: WAYS[way](model_of(*right_layers())))


def test_sums_of_gradients_that_a_train_step_holds_pass(on_threads):
    on_threads(2, lambda: fit(model_of(LAYERS.Dropout(0.5), ending=Alternating)))
