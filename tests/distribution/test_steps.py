"""Gradients under a distribution are those of one process: norms, clipping, sums of steps."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like import distribution as dist
from sok_like.distribution.sharded_variable import path_of
from tests.distribution.meshes import (
    LAYOUTS,
    check_as_alone,
    data,
    make_model,
    of_loop,
    under,
    weights_of,
)
from tests.training import train_step

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
for_keras_3 = pytest.mark.keras(slow=True)
STEPS = 2


def sgd():
    return of_loop(tf.keras.optimizers.SGD(0.1))


def centralized(gradients):
    return [g - tf.reduce_mean(g, axis=0, keepdims=True) for g in gradients]


def by_keras_ops(gradients):
    import keras

    norms = [
        keras.ops.sqrt(keras.ops.sum(keras.ops.square(tf.convert_to_tensor(g)))) for g in gradients
    ]
    return [g * tf.minimum(1.0, 0.02 / norm) for g, norm in zip(gradients, norms, strict=True)]


# What a program makes of its gradients before it applies them.
CHANGES = {
    "clip_by_global_norm": lambda g: tf.clip_by_global_norm(g, 0.05)[0],
    "clip_by_norm": lambda g: [tf.clip_by_norm(one, 0.02) for one in g],
    "clip_by_value": lambda g: [tf.clip_by_value(one, -0.01, 0.01) for one in g],
    "norm": lambda g: [one / (1.0 + tf.norm(one)) for one in g],
    "centralized": centralized,
    "keras_ops": by_keras_ops,
    "tf.gradients": lambda g: [one * (0.1 / tf.linalg.global_norm(g)) for one in g],
}


def changed(name):
    """A few steps of changed gradients: losses, global norms, final weights."""
    (inputs, target), model, optimizer = data(), make_model(), sgd()

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(list(inputs), training=True) - target) ** 2)
        of = tf.gradients if name == "tf.gradients" else tape.gradient
        gradients = of(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        gradients = CHANGES[name](gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, norm

    traced = name in ("tf.gradients", "clip_by_global_norm")
    step = tf.function(step) if traced else step
    numbers = np.array([[float(number) for number in step()] for _ in range(STEPS)])
    return {"losses": numbers[:, 0], "norms": numbers[:, 1], "weights": weights_of(model)}


@pytest.mark.parametrize(
    "shape, name",
    [
        *(((2, 2), "clip_by_global_norm"), ((1, 2), "clip_by_norm"), ((1, 2), "norm")),
        pytest.param((2, 1), "clip_by_value", marks=for_keras_3),
        pytest.param((1, 2), "tf.gradients", marks=for_keras_3),
        pytest.param((1, 2), "centralized", marks=for_keras_3),
        pytest.param((1, 2), "keras_ops", marks=for_keras_3),
    ],
)
def test_changed_gradients_are_those_of_one_process(on_processes, shape, name):
    losses = check_as_alone(on_processes, shape, LAYOUTS, changed, name)["losses"]
    assert losses[-1] != losses[0]


def accumulated():
    """Gradients of two batches added in variables of the program's own, then applied as one."""
    (inputs, target), model, optimizer = data(), make_model(), sgd()
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros(v.shape)) for v in variables]
    for part in (slice(0, 5), slice(5, 10)):
        with tf.GradientTape() as tape:
            outputs = model([whole[part] for whole in inputs], training=True)
            loss = tf.reduce_mean((outputs - target[part]) ** 2)
        for total, gradient in zip(sums, tape.gradient(loss, variables), strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))
    optimizer.apply_gradients(zip(sums, variables, strict=True))
    return weights_of(model)


def penalties():
    """L1 and L2 penalties of sharded kernels, in a fit; one is a table, one is along the batch."""
    kinds, (inputs, target) = tf.keras.regularizers, data()
    model = make_model(penalties=(kinds.L2(0.1), kinds.L1(0.1), kinds.L1L2(0.1, 0.1)))
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(list(inputs), target, **options).history
    return {"loss": np.array(history["loss"]), "weights": weights_of(model)}


def of_inputs():
    """A penalty of the gradient by the inputs, whose gradient is one of second order."""
    (inputs, target), model, optimizer = data(), make_model(), sgd()
    numbers, ids = map(tf.constant, inputs)

    def loss_of():
        with tf.GradientTape() as inner:
            inner.watch(numbers)
            outputs = model([numbers, ids], training=True)
        penalty = tf.reduce_sum(inner.gradient(outputs, numbers) ** 2)
        return tf.reduce_mean((outputs - target) ** 2) + penalty

    for _ in range(2):
        train_step(optimizer, model.trainable_variables, loss_of)
    return weights_of(model)


def chained():
    """A model of another one's outputs, as a generator and its discriminator are."""
    (inputs, target), layers = data(), tf.keras.layers
    tf.keras.utils.set_random_seed(3)
    first = tf.keras.Sequential([layers.Input([6]), layers.Dense(5, "tanh", name="wide")])
    second = tf.keras.Sequential([layers.Input([5]), layers.Dense(1, name="head")])
    variables, optimizer = [*first.trainable_variables, *second.trainable_variables], sgd()

    def loss_of():
        outputs = second(first(inputs[0], training=True), training=True)
        return tf.reduce_mean((outputs - target) ** 2)

    for _ in range(2):
        train_step(optimizer, variables, loss_of)
    return [v.numpy() for v in variables]


@pytest.mark.parametrize(
    "shape, body",
    [
        *(((1, 2), accumulated), ((1, 2), of_inputs)),
        pytest.param((1, 2), penalties, marks=for_keras_3),
        pytest.param((2, 1), penalties, marks=for_keras_3),
        pytest.param((2, 1), chained, marks=for_keras_3),
    ],
)
def test_steps_are_those_of_one_process(on_processes, shape, body):
    check_as_alone(on_processes, shape, LAYOUTS, body)


def refused():
    """Gradients that are of no known part."""
    model = make_model()
    table = next(v for v in model.trainable_variables if "rows" in path_of(v))
    optimizer = dist.distribution().optimizer(tf.keras.optimizers.SGD(0.1))
    words = r"(?s)must come from `tf.GradientTape.gradient`.*rows.*\(9, 3\)"
    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), [9, 3])
    for gradient in (slices, tf.ones([2, 3])):
        with pytest.raises(ValueError, match=words):
            optimizer.apply_gradients([(gradient, table)])


def test_gradient_of_unknown_part_is_refused(on_processes):
    on_processes(2, under, (1, 2), LAYOUTS, refused)


# Of a kernel with two rows and of inputs [4, 3]. A shard has one row: taken for the whole it would
# be broadcast, or summed, without an error.
OPERATIONS = {
    "*": lambda kernel, x: x[:2] * kernel,
    "* from the left": lambda kernel, x: kernel * x[:2],
    "tf.multiply": lambda kernel, x: tf.multiply(x[:2], kernel),
    "raw_ops.Mul": lambda kernel, x: tf.raw_ops.Mul(x=x[:2], y=kernel),
    "reduce_sum": lambda kernel, x: tf.reduce_sum(kernel),
    "l2_loss": lambda kernel, x: tf.nn.l2_loss(kernel),
    "square": lambda kernel, x: tf.square(kernel),
    "maximum": lambda kernel, x: tf.maximum(x[:2], kernel),
    "concat": lambda kernel, x: tf.concat([kernel, x], 0),
    "matmul": lambda kernel, x: tf.matmul(x, kernel, transpose_b=True),
    "gather": lambda kernel, x: tf.gather(kernel, [1, 0, 1]),
}


def operations():
    """TensorFlow's ops of a variable, eagerly and in a function, and steps by the gradients."""
    tf.keras.utils.set_random_seed(9)
    layer = tf.keras.layers.Dense(3, use_bias=False, name="cut")
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), layer])
    optimizer = sgd()
    x, found = tf.constant(np.random.default_rng(2).normal(size=[4, 3]), tf.float32), {}
    for name, operation in OPERATIONS.items():

        def step(of=operation):
            with tf.GradientTape() as tape:
                value = of(layer.kernel, x)
                loss = tf.reduce_sum(value**2)
            gradient = tape.gradient(loss, layer.kernel)
            optimizer.apply_gradients([(gradient, layer.kernel)])
            return value

        for how, call in {"eagerly": step, "in a function": tf.function(step)}.items():
            found[f"{name} {how}"] = call().numpy()
    return {**found, "weights": [v.numpy() for v in model.weights]}


@for_keras_3
def test_operations_are_those_of_an_ordinary_variable(on_processes):
    check_as_alone(on_processes, (1, 2), {"cut/kernel": ("model", None)}, operations)
