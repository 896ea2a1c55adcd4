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
from tests.distribution.meshes import assert_close

pytestmark = [pytest.mark.keras(slow=True), pytest.mark.ranks]

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


CASES = [((1, 2), "adagrad"), ((2, 1), "adam"), ((2, 2), "sgd")]
CASES += [pytest.param((1, 4), "sgd", marks=pytest.mark.slow)]
each_case = pytest.mark.parametrize("shape, optimizer", CASES)


_expected = {}


def expected(optimizer, start, eager):
    """The oracle's training, once: ranks and meshes start with equal weights."""
    if (optimizer, eager) not in _expected:
        _expected[optimizer, eager] = start, oracle(optimizer, start, eager)
    first, training = _expected[optimizer, eager]
    assert_close(start, first, "initial weights")
    return training


@each_case
def test_mixed_model_is_the_unsharded_one(on_processes, shape, optimizer):
    ranks = on_processes(math.prod(shape), train_on_mesh, shape, optimizer)
    for rank, result in enumerate(ranks):
        assert len(result["sharded"]["losses"]) == 4 * EPOCHS
        assert result["sharded"]["losses"][-1] < result["sharded"]["losses"][0]
        right = expected(optimizer, result["start"], is_eager(shape))
        assert_close(result["sharded"], right, f"rank {rank}:")


@each_case
def test_shards_and_slots_are_parts(on_processes, shape, optimizer):
    sizes = dict(zip(("batch", "model"), shape, strict=True))
    ranks = on_processes(math.prod(shape), train_on_mesh, shape, optimizer)
    of_layouts = [a for axes in LAYOUTS.values() for a in axes if a and sizes[a] > 1]
    slots_each = {"sgd": 1, "adam": 2, "adagrad": 1}[optimizer]
    for kind, number in (("shards", len(of_layouts)), ("slots", slots_each * len(of_layouts))):
        assert len(ranks[0][kind]) == number
        for path, (layout, whole, _) in ranks[0][kind].items():
            parts = max(sizes[axis] for axis in layout if axis is not None)
            (dim,) = [i for i, axis in enumerate(layout) if axis is not None]
            here = [rank[kind][path][2] for rank in ranks]
            rest = np.prod(whole) // whole[dim]
            assert set(here) <= {whole[dim] // parts * rest, -(-whole[dim] // parts) * rest}, path
            # Each part is on as many ranks as the other axis is long.
            assert sum(here) == np.prod(whole) * math.prod(shape) // parts, path
    assert ranks[0]["warned"] == []


def test_summary_says_what_lies_where(on_processes):
    table = {
        line.split()[0]: line
        for line in on_processes(2, train_on_mesh, (1, 2), "adagrad")[0]["table"].splitlines()
    }
    kernel = table["dense_column/kernel"]
    assert "(6, 5)" in kernel and "(None, 'model')" in kernel and "(6, 3)" in kernel
    assert " 72 " in kernel  # bytes of 6 * 3 floats
    assert "all_gather of outputs, all_reduce of input gradients" in kernel
    assert "all_reduce of outputs, all_gather of input gradients" in table["dense_row/kernel"]
    assert "all_gather of the batch's rows" in table["rows/embeddings"]
    assert "all_gather when read" in table["layer_norm/gamma"]
    assert table["dense_column/bias"].endswith("none")
