"""Programs' own training steps under a distribution: norms, clipping, and gradients as such.

Each is trained twice, under a distribution on ranks and by Keras alone in one process.
"""

import numpy as np
import tensorflow as tf

from sok_like.distribution.sharded_variable import path_of
from tests.checks import Alone
from tests.checks.distribution_use import under

LAYOUTS = {
    "wide/kernel": (None, "model"),
    "wide/bias": ("model",),
    "narrow/kernel": ("model", None),
    "rows/embeddings": ("model", None),
    "columns/embeddings": (None, "model"),
    "over_batch/kernel": ("batch", None),
}
STEPS = 3


def checks(world_size):
    chosen = {
        2: {(1, 2): tuple(CHANGES), (2, 1): ("clip_by_global_norm", "noise", "tf.gradients")},
        4: {(2, 2): ("clip_by_global_norm", "clip_by_norm", "norm")},
    }
    found = {
        f"{shape[0]}x{shape[1]}.{name}": lambda s=shape, n=name: both(s, n)
        for shape, names in chosen.get(world_size, {}).items()
        for name in names
    }
    return found | (
        {f.__name__: f for f in (accumulated, wrong, penalties, of_inputs, chained)}
        if world_size == 2
        else {}
    )


def _norms(gradients):
    return [g / (1.0 + tf.norm(g)) for g in gradients]


def _centralized(gradients):
    return [g - tf.reduce_mean(g, axis=0, keepdims=True) for g in gradients]


def _keras_ops(gradients):
    import keras

    norms = [
        keras.ops.sqrt(keras.ops.sum(keras.ops.square(tf.convert_to_tensor(g)))) for g in gradients
    ]
    return [g * tf.minimum(1.0, 0.02 / norm) for g, norm in zip(gradients, norms, strict=True)]


# What a program makes of its gradients before it applies them.
CHANGES = {
    "clip_by_global_norm": lambda g: tf.clip_by_global_norm(g, 0.05)[0],
    "clip_by_norm": lambda g: [tf.clip_by_norm(one, 0.02) for one in g],
    "global_norm": lambda g: [one * (0.1 / tf.linalg.global_norm(g)) for one in g],
    "clip_by_value": lambda g: [tf.clip_by_value(one, -0.01, 0.01) for one in g],
    "norm": _norms,
    "centralized": _centralized,
    "keras_ops": _keras_ops,
    "noise": lambda g: [one + 0.01 * tf.ones(one.shape) for one in g],
    "tf.gradients": lambda g: tf.clip_by_global_norm(g, 0.05)[0],
}


def make_model():
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(3)
    numbers, ids = layers.Input([6]), layers.Input([3], dtype="int64")
    hidden = layers.Dense(5, "relu", name="wide")(numbers)
    hidden = layers.Dense(7, "tanh", name="narrow")(hidden)
    rows = layers.Flatten()(layers.Embedding(9, 3, name="rows")(ids))
    columns = layers.Flatten()(layers.Embedding(9, 3, name="columns")(ids))
    hidden = layers.Concatenate()([hidden, rows, columns])
    hidden = layers.Dense(4, name="over_batch")(hidden)
    return tf.keras.Model([numbers, ids], layers.Dense(1, name="head")(hidden))


def data():
    rng = np.random.default_rng(8)
    return (rng.normal(size=(10, 6)).astype("f"), rng.integers(0, 9, (10, 3))), rng.normal(
        size=(10, 1)
    ).astype("f")


def train(model, optimizer, change, traced=False, by_graph=False):
    """A few steps of `change`d gradients: losses, global norms, final weights."""
    inputs, target = data()

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(list(inputs), training=True) - target) ** 2)
        of = tf.gradients if by_graph else tape.gradient
        gradients = of(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        gradients = change(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, norm

    step = tf.function(step) if traced else step
    numbers = np.array([[float(number) for number in step()] for _ in range(STEPS)])
    weights = {path_of(v): v.numpy() for v in model.variables}
    return {"losses": numbers[:, 0], "norms": numbers[:, 1], "weights": weights}


def _sgd(dist=None):
    optimizer = tf.keras.optimizers.SGD(0.1)
    return optimizer if dist is None else dist.distribution().optimizer(optimizer)


def _changed(name, dist=None):
    by_graph = name == "tf.gradients"
    traced = by_graph or name == "clip_by_global_norm"
    return train(make_model(), _sgd(dist), CHANGES[name], traced, by_graph)


def both(shape, name):
    sharded = under(shape, lambda dist: _changed(name, dist), LAYOUTS)
    return {"expected": Alone(_changed, (name,)), "sharded": sharded}


def _accumulated(dist=None):
    inputs, target = data()
    model, optimizer = make_model(), _sgd(dist)
    sums = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]
    for part in (slice(0, 5), slice(5, 10)):
        with tf.GradientTape() as tape:
            outputs = model([whole[part] for whole in inputs], training=True)
            loss = tf.reduce_mean((outputs - target[part]) ** 2)
        for total, gradient in zip(
            sums, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            total.assign_add(tf.convert_to_tensor(gradient))
    optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
    return {path_of(v): v.numpy() for v in model.variables}


def accumulated():
    """Gradients of two batches added in variables of the program's own, then applied as one."""
    return {"expected": Alone(_accumulated), "sharded": under((1, 2), _accumulated, LAYOUTS)}


def wrong():
    """What is said of gradients that are of no known part."""

    def body(dist):
        model = make_model()
        table = next(v for v in model.trainable_variables if "rows" in path_of(v))
        optimizer = dist.distribution().optimizer(tf.keras.optimizers.SGD(0.1))
        found = {}
        for name, gradient in (
            ("slices", tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), [9, 3])),
            ("shape", tf.ones([2, 3])),
        ):
            try:
                optimizer.apply_gradients([(gradient, table)])
                found[name] = "nothing"
            except ValueError as error:
                found[name] = str(error)
        return found

    return under((1, 2), body, LAYOUTS)


def _on_meshes(run):
    """What `run(distribution module)` finds on two meshes, and by Keras alone."""
    sharded = {str(shape): under(shape, run, LAYOUTS) for shape in ((1, 2), (2, 1))}
    return {"expected": Alone(run), **sharded}


def penalties():
    """L1 and L2 penalties of sharded kernels, in a fit; one is a table, one is along the batch."""
    return _on_meshes(_penalties)


def _penalties(dist=None):
    layers, kinds = tf.keras.layers, tf.keras.regularizers
    tf.keras.utils.set_random_seed(3)
    numbers, ids = layers.Input([6]), layers.Input([3], dtype="int64")
    hidden = layers.Dense(5, name="wide", kernel_regularizer=kinds.L2(0.1))(numbers)
    rows = layers.Embedding(9, 3, name="rows", embeddings_regularizer=kinds.L1(0.1))(ids)
    hidden = layers.Concatenate()([hidden, layers.Flatten()(rows)])
    hidden = layers.Dense(4, name="over_batch", kernel_regularizer=kinds.L1L2(0.1, 0.1))(hidden)
    model = tf.keras.Model([numbers, ids], layers.Dense(1, name="head")(hidden))
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    inputs, target = data()
    history = model.fit(
        list(inputs), target, batch_size=5, epochs=2, shuffle=False, verbose=0
    ).history
    weights = {path_of(v): v.numpy() for v in model.variables}
    return {"loss": np.array(history["loss"]), "weights": weights}


def of_inputs():
    """A penalty of the gradient by the inputs, whose gradient is one of second order."""
    return _on_meshes(_of_inputs)


def _of_inputs(dist=None):
    inputs, target = data()
    model, optimizer = make_model(), _sgd(dist)
    numbers, ids = map(tf.constant, inputs)
    for _ in range(2):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(numbers)
                outputs = model([numbers, ids], training=True)
            by_input = inner.gradient(outputs, numbers)
            loss = tf.reduce_mean((outputs - target) ** 2) + tf.reduce_sum(by_input**2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {path_of(v): v.numpy() for v in model.variables}


def chained():
    """A model of another one's outputs, as a generator and its discriminator are."""
    return _on_meshes(_chained)


def _chained(dist=None):
    inputs, target = data()
    tf.keras.utils.set_random_seed(3)
    layers = tf.keras.layers
    first = tf.keras.Sequential([layers.Input([6]), layers.Dense(5, "tanh", name="wide")])
    second = tf.keras.Sequential([layers.Input([5]), layers.Dense(1, name="head")])
    variables, optimizer = [*first.trainable_variables, *second.trainable_variables], _sgd(dist)
    for _ in range(2):
        with tf.GradientTape() as tape:
            outputs = second(first(inputs[0], training=True), training=True)
            loss = tf.reduce_mean((outputs - target) ** 2)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return [v.numpy() for v in variables]
