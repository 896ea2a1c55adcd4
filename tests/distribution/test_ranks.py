"""Models on meshes of ranks against the same models by Keras alone in one process."""

import math
import os
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import distribution as dist
from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.table.variable import is_embedding_variable
from tests.distribution.meshes import assert_close, layouts, under

pytestmark = [pytest.mark.keras(slow=True), pytest.mark.ranks]

# 2 steps per epoch, of 12 and of 8 samples.
SAMPLES, BATCH, EPOCHS = 20, 12, 5 if os.environ.get("SLOW") else 2
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


def fit(model, optimizer, eager):
    """Compiles, trains and evaluates: losses by step, evaluation, predictions."""
    options = {"jit_compile": False, "run_eagerly": eager}
    model.compile(optimizer=make_optimizer(optimizer), loss="mse", **options)
    features, target = data()
    inputs, targets = [features[t.name] for t in model.inputs], [target] * len(model.outputs)
    losses = []
    see = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(inputs, targets, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[see])
    model.run_eagerly = True  # evaluation and prediction take longer to trace than to do
    return {
        "losses": np.array(losses),
        "evaluated": np.array(model.evaluate(inputs, targets, batch_size=15, verbose=0)),
        "predicted": np.concatenate(model.predict(inputs, batch_size=15, verbose=0), axis=1),
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


def oracle(optimizer, start, eager):
    """The training by Keras alone from the same initial weights."""
    model = make_model()
    for variable in _numbers(model):
        variable.assign(start[path_of(variable)])
    return {**fit(model, optimizer, eager), "weights": weights_of(model)}


def train_on_mesh(shape, optimizer, eager):
    """From this rank: initial weights, the sharded model's training, and this rank's shards."""
    mesh, layout_map = layouts(shape, LAYOUTS)
    with dist.ModelParallel(mesh, layout_map).scope(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = make_model(sok)
        start = weights_of(model)
        sharded = fit(model, optimizer, eager)
        sharded["weights"] = weights_of(model)
        table = dist.summary(model)
    assert not [w for w in said if "LayoutMap" in str(w.message)]
    slots = model.optimizer.variables
    slots = slots() if callable(slots) else slots
    parts = [parts_of(model.variables), parts_of(slots)]
    return {"sharded": sharded, "start": start, "parts": parts, "table": table}


def parts_of(variables):
    """By path: layout, whole shape, and the elements stored on this rank."""
    return {
        path_of(v): (tuple(v.layout), tuple(v.global_shape), math.prod(v.local.shape))
        for v in variables
        if shard_of(v)
    }


@pytest.mark.parametrize(
    "shape, optimizer",
    [
        *(((1, 2), "adagrad"), ((2, 1), "adam"), ((2, 2), "sgd")),
        pytest.param((1, 4), "sgd", marks=pytest.mark.slow),
    ],
)
def test_mixed_model_is_the_unsharded_one(on_processes, shape, optimizer):
    # Tracing so many layers takes longer than these steps: one mesh shows that it can be done.
    eager = shape != (1, 2)
    ranks = on_processes(math.prod(shape), train_on_mesh, shape, optimizer, eager)
    right = oracle(optimizer, ranks[0]["start"], eager)
    assert len(right["losses"]) == 2 * EPOCHS and right["losses"][-1] < right["losses"][1]
    for rank, result in enumerate(ranks):
        assert_close(result["start"], ranks[0]["start"], f"rank {rank}:")
        assert_close(result["sharded"], right, f"rank {rank}:")
    check_parts([result["parts"] for result in ranks], shape, optimizer)
    if shape == (1, 2):
        check_summary(ranks[0]["table"])


def check_parts(ranks, shape, optimizer):
    """What ranks hold of weights and of slot variables."""
    sizes = dict(zip(("batch", "model"), shape, strict=True))
    of_layouts = [a for axes in LAYOUTS.values() for a in axes if a and sizes[a] > 1]
    for kind, each in enumerate((1, {"sgd": 1, "adam": 2, "adagrad": 1}[optimizer])):
        assert len(ranks[0][kind]) == each * len(of_layouts)
        for path, (layout, whole, _) in ranks[0][kind].items():
            ((dim, axis),) = [(i, axis) for i, axis in enumerate(layout) if axis is not None]
            here = [rank[kind][path][2] for rank in ranks]
            rest, parts = np.prod(whole) // whole[dim], sizes[axis]
            assert set(here) <= {whole[dim] // parts * rest, -(-whole[dim] // parts) * rest}, path
            # Each part is on as many ranks as the other axis is long.
            assert sum(here) == np.prod(whole) * math.prod(shape) // parts, path


def check_summary(table):
    """It says what lies where."""
    lines = {line.split()[0]: line for line in table.splitlines()}
    for path, words in {
        "dense_column/kernel": ["(6, 5)", "(None, 'model')", "(6, 3)", " 72 "],  # of 6 * 3 floats
        "dense_row/kernel": ["all_reduce of outputs, all_gather of input gradients"],
        "rows/embeddings": ["all_gather of the batch's rows"],
        "layer_norm/gamma": ["all_gather when read"],
        "dense_column/bias": ["none"],
    }.items():
        assert all(word in lines[path] for word in words), lines[path]
    assert "all_gather of outputs, all_reduce of input gradients" in lines["dense_column/kernel"]


class Twice(tf.keras.layers.Layer):
    """A layer that calls another one, which the model also calls by itself."""

    def __init__(self, inner):
        super().__init__(name="twice")
        self.inner = inner

    def call(self, inputs):
        return self.inner(self.inner(inputs))


def summary_of_a_shared_layer():
    shared, inputs = tf.keras.layers.Dense(4, name="shared"), tf.keras.Input([4])
    return dist.summary(tf.keras.Model(inputs, Twice(shared)(shared(inputs))))


def test_summary_names_the_rule_of_a_shared_layer(on_processes):
    layout = {".*shared/kernel": (None, "model")}
    for table in on_processes(2, under, (1, 2), layout, summary_of_a_shared_layer):
        assert "all_gather of outputs, all_reduce of input gradients" in table
