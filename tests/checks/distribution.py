"""The same model trained twice: under a distribution on ranks, and by Keras alone by the test.

The model has a branch with a head of its own for each kind of layer, so each is trained as if it
were alone. The oracle has ordinary Keras layers only. This package's own tables are one-hot
products there, since Keras 3 squares gradients of repeated ids one by one, and they sum them first.
"""

import math
import os
import warnings

import numpy as np
import tensorflow as tf

from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.table.variable import is_embedding_variable

# 4 steps per epoch, the last of 8 samples.
SAMPLES, BATCH, EPOCHS = 44, 12, 5 if os.environ.get("SLOW") else 2
ROWS, DIM, HASH_KEYS = 10, 3, 18
LAYOUTS = {
    "dense_column.*kernel": (None, "model"),
    "dense_column.*bias": ("model",),
    "dense_row.*kernel": ("model", None),
    "einsum/kernel": (None, None, "model"),
    "heads_in/kernel": (None, "model", None),
    "conv_out.*kernel": (None, None, None, "model"),
    "conv_out.*bias": ("model",),
    "conv_in/kernel": (None, None, "model", None),
    "rows/embeddings": ("model", None),
    "columns/embeddings": (None, "model"),
    "bag/embeddings": ("model", None),
    "depthwise/.*kernel": (None, None, "model", None),  # without a rule: gathered
    "layer_norm/gamma": ("model",),
    "gru/.*/kernel": (None, "model"),  # read in a loop
    "over_batch/kernel": ("batch", None),
}


# Meshes by number of ranks, and optimizers. A case takes half a minute of all cores.
CHECKED = {
    2: {(1, 2): ("adagrad",), (2, 1): ("adam",)},
    4: {(2, 2): ("sgd",)},
}
if os.environ.get("SLOW"):
    CHECKED[1] = {(1, 1): ("adam",)}
    CHECKED[2][1, 2] += ("sgd",)
    CHECKED[4] |= {(2, 2): ("sgd", "adam"), (1, 4): ("sgd",), (4, 1): ("adagrad",)}


def checks(world_size):
    return {
        f"{shape[0]}x{shape[1]}.{optimizer}": lambda s=shape, o=optimizer: train_on_mesh(s, o)
        for shape, optimizers in CHECKED.get(world_size, {}).items()
        for optimizer in optimizers
    }


def make_optimizer(name):
    optimizers = tf.keras.optimizers
    return {
        "sgd": lambda: optimizers.SGD(0.01, momentum=0.9),
        # Where a gradient is near 0, Adam with a smaller epsilon makes a step of its rounding.
        "adam": lambda: optimizers.Adam(0.01, epsilon=1e-4),
        "adagrad": lambda: optimizers.Adagrad(0.1),
    }[name]()


def data():
    """Inputs by name, and one target per head."""
    rng = np.random.default_rng(5)
    features = {
        "numbers": rng.normal(size=(SAMPLES, 6)).astype("f"),
        "words": rng.normal(size=(SAMPLES, 4, 6)).astype("f"),
        "image": rng.normal(size=(SAMPLES, 6, 6, 3)).astype("f"),
        "ids": rng.integers(0, ROWS, (SAMPLES, 4)),
        "keys": rng.integers(0, HASH_KEYS, (SAMPLES, 2)),
    }
    return features, rng.normal(size=(SAMPLES, 1)).astype("f")


class OneHotEmbedding(tf.keras.layers.Embedding):
    """Keras' Embedding with dense gradients."""

    def call(self, inputs):
        return tf.one_hot(inputs, self.input_dim) @ tf.convert_to_tensor(self.embeddings)


def make_model(sok=None):
    """The model; Keras alone if `sok` is None. Every branch ends in `[batch, width]`."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(11)
    numbers = layers.Input([6], name="numbers")
    words = layers.Input([4, 6], name="words")
    image = layers.Input([6, 6, 3], name="image")
    ids = layers.Input([4], name="ids", dtype="int64")
    keys = layers.Input([2], name="keys", dtype="int64")
    summing = layers.Embedding if sok else OneHotEmbedding
    flat = layers.Flatten
    dense = layers.Dense(5, "relu", name="dense_column")(numbers)
    dense = layers.Dense(7, "tanh", name="dense_row")(dense)
    attention = layers.EinsumDense("abc,cde->abde", (4, 2, 5), bias_axes="de", name="einsum")(words)
    attention = layers.EinsumDense("abde,def->abf", (4, 3), name="heads_in")(attention)
    attention = layers.GRU(3, name="gru")(attention)
    conv = layers.Conv2D(5, 3, activation="relu", name="conv_out")(image)
    conv = layers.Conv2D(2, 2, strides=2, padding="same", name="conv_in")(conv)
    other = layers.DepthwiseConv2D(2, use_bias=False, name="depthwise")(image)
    other = layers.BatchNormalization(name="batch")(other)
    other = layers.LayerNormalization(name="layer_norm")(flat()(other))
    other = layers.Dense(3, name="over_batch")(other)
    rows = flat()(layers.Embedding(ROWS, DIM, name="rows")(ids))
    columns = flat()(layers.Embedding(ROWS, 5, name="columns")(ids))
    if sok:
        bag = sok.Embedding(ROWS, DIM, combiner="mean", name="bag")(ids)
        hashed = sok.All2AllDenseEmbedding(None, DIM, 1, 2, name="hashed")(keys)
    else:
        bag = layers.GlobalAveragePooling1D()(summing(ROWS, DIM, name="bag")(ids))
        hashed = summing(HASH_KEYS, DIM, name="hashed")(keys)
    branches = [dense, attention, flat()(conv), other, rows, columns, bag, flat()(hashed)]
    heads = [layers.Dense(1, name=f"head_{i}")(branch) for i, branch in enumerate(branches)]
    return tf.keras.Model([numbers, words, image, ids, keys], heads)


class Losses(tf.keras.callbacks.Callback):
    """The loss after each step."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def fit(model, optimizer, eager):
    """Compiles, trains and evaluates: losses by step, evaluation, predictions."""
    options = {"jit_compile": False, "run_eagerly": eager}
    model.compile(optimizer=make_optimizer(optimizer), loss="mse", **options)
    features, target = data()
    inputs, targets = [features[t.name] for t in model.inputs], [target] * len(model.outputs)
    losses = Losses()
    model.fit(inputs, targets, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[losses])
    model.run_eagerly = True  # evaluation and prediction take longer to trace than to do
    return {
        "losses": np.array(losses.losses),
        "evaluated": np.array(model.evaluate(inputs, targets, batch_size=2 * BATCH, verbose=0)),
        "predicted": np.concatenate(model.predict(inputs, batch_size=2 * BATCH, verbose=0), axis=1),
    }


def _numbers(model):
    """Variables except tables and the states of random generators, whose names are numbered."""
    ordinary = [v for v in model.variables if not is_embedding_variable(v)]
    return [v for v in ordinary if tf.as_dtype(v.dtype).is_floating]


def weights_of(model):
    """Whole weights by path; of the hash table, the rows of the keys in order."""
    found = {path_of(v): v.numpy() for v in _numbers(model)}
    hashed = model.get_layer("hashed")
    if hasattr(hashed, "table"):
        keys = tf.reshape(tf.range(HASH_KEYS, dtype=tf.int64), [-1, 2])
        rows = hashed(keys, training=False)
        found["hashed/embeddings"] = tf.reshape(rows, [-1, DIM]).numpy()
    return found


def is_eager(shape):
    """Tracing so many layers takes longer than these steps: one mesh shows that it can be done."""
    return shape != (1, 2)


def oracle(optimizer, start, eager):
    """The training by Keras alone from the same initial weights."""
    model = make_model()
    for variable in _numbers(model):
        variable.assign(start[path_of(variable)])
    return {**fit(model, optimizer, eager), "weights": weights_of(model)}


def train_on_mesh(shape, optimizer):
    """From this rank: initial weights, the sharded model's training, and this rank's shards."""
    import sok_like as sok
    from sok_like import distribution as dist

    mesh = dist.DeviceMesh(shape, ("batch", "model"))
    layout_map = dist.LayoutMap(mesh)
    for path, axes in LAYOUTS.items():
        layout_map[path] = axes
    with dist.ModelParallel(mesh, layout_map).scope(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = make_model(sok)
        start = weights_of(model)
        sharded = fit(model, optimizer, is_eager(shape))
        sharded["weights"] = weights_of(model)
        table = dist.summary(model)
    slots = model.optimizer.variables
    slots = slots() if callable(slots) else slots
    return {
        "sharded": sharded,
        "start": start,
        "shards": {path_of(v): _facts(v) for v in model.variables if shard_of(v)},
        "slots": {path_of(v): _facts(v) for v in slots if shard_of(v)},
        "table": table,
        "warned": [str(w.message) for w in said if "LayoutMap" in str(w.message)],
    }


def _facts(variable):
    """Layout, whole shape, and the elements stored on this rank."""
    return tuple(variable.layout), tuple(variable.global_shape), math.prod(variable.local.shape)
