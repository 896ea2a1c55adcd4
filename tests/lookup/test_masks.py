"""Masks of padding, beside stock `Embedding(mask_zero=True)`, through what follows the rows."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras

WORDS, DIM, LENGTH, BATCH = 9, 4, 5, 8
# The layer, what follows it, and how the model is made.
CASES = [
    ("hash", "average", "sequential"),
    ("group", "average", "functional"),
    ("strings", "lstm", "functional"),
    ("dense", "average", "functional"),
    ("dmp", "average", "functional"),
    ("dmp_hashed", "loss", "subclass"),
    ("all2all", "loss", "functional"),
    ("fused", "loss", "functional"),
]
TRACED = ("hash", "group", "dmp_hashed")  # the others eagerly, which takes a third of the time


def batch():
    """Ids and labels; each half has as much padding, so that means over ranks are global means."""
    rng = np.random.default_rng(3)
    ids = rng.integers(1, WORDS, [BATCH, LENGTH])
    ids[np.arange(LENGTH) >= np.array([5, 1, 3, 2] * 2)[:, np.newaxis]] = 0
    return ids, rng.normal(size=[BATCH, LENGTH, 1]).astype(np.float32)


def initial_rows():
    rows = np.random.default_rng(4).normal(size=[WORDS, DIM]).astype(np.float32)
    rows[0] = 0  # as hash tables give for padding
    return rows


def look_up_with(kind):
    """A layer, a function from ids to rows, and one that sets the rows of ids."""
    known, rows = np.arange(1, WORDS), initial_rows()
    if kind in ("stock", "dense", "dmp", "dmp_hashed"):
        layer = tf.keras.layers.Embedding(WORDS, DIM, mask_zero=True)
        if kind == "stock":
            return layer, layer, lambda: layer.set_weights([rows])
        if kind == "dense":
            layer = sok.Embedding(WORDS, DIM, mask_zero=True)
            return layer, layer, lambda: layer.set_weights([rows])
        which = ("dmp", "dmp_hashed").index(kind)
        layer = dmp.DistributedEmbedding([layer, sok.HashEmbedding(DIM, pad_key=0)])
        weights = [rows, (known, rows[1:])]
        return layer, lambda x: layer([x, x])[which], lambda: layer.set_weights(weights)
    if kind in ("group", "strings"):
        pad_key = "" if kind == "strings" else 0
        layer = sok.GroupEmbedding({"items": DIM}, combiners=None, pad_key=pad_key)
        if kind == "strings":
            prints = tf.raw_ops.Fingerprint(data=known.astype(str), method="farmhash64")
            known = tf.bitcast(prints, tf.int64)
        table = layer.tables["items"]
        call = lambda ids: layer({"items": ids})["items"]  # noqa: E731
        return layer, call, lambda: sok.assign(table, known, rows[1:])
    if kind == "hash":
        layer = sok.HashEmbedding(DIM, pad_key=0)
    else:
        layer = sok.All2AllDenseEmbedding(None, DIM, 1, LENGTH, pad_key=0)
    return layer, layer, lambda: sok.assign(layer.table, known, rows[1:])


def head_of(name):
    """Layers from rows to outputs."""
    layers = tf.keras.layers
    first = {"average": [layers.GlobalAveragePooling1D()], "lstm": [layers.LSTM(3)], "loss": []}
    return [*first[name], layers.Dense(1)]


def apply(layers, rows):
    for layer in layers:
        rows = layer(rows)
    return rows


class Net(tf.keras.Model):
    def __init__(self, kind, head):
        super().__init__()
        self.embedding, look_up, self.set_rows = look_up_with(kind)
        self.head = head_of(head)
        # AutoGraph cannot convert functions that functions have made.
        self.look_up = tf.autograph.experimental.do_not_convert(look_up)

    def call(self, ids):
        return apply(self.head, self.look_up(ids))


def make(kind, head, way, ids):
    """A model that has run once, with the same weights for all kinds."""
    if way == "subclass":
        model = Net(kind, head)
        model(ids)
        layers, set_rows = model.head, [model.set_rows]
    else:
        embedding, look_up, set_rows = look_up_with(kind)
        layers = head_of(head)
        if way == "sequential":
            model = tf.keras.Sequential(
                [tf.keras.Input(ids.shape[1:], dtype=ids.dtype), embedding, *layers]
            )
            set_rows = [set_rows]
        else:
            inputs = tf.keras.Input(ids.shape[1:], dtype=ids.dtype)
            _, again, set_again = look_up_with(kind)
            rows = tf.keras.layers.Average()([look_up(inputs), again(inputs)])
            model = tf.keras.Model(inputs, apply(layers, rows))
            set_rows = [set_rows, set_again]
    for each in set_rows:
        each()
    rng = np.random.default_rng(5)
    for weight in (w for layer in layers for w in layer.weights):
        weight.assign(rng.normal(size=weight.shape))
    return model


def trained(kind, head, way, folder=None, four_axes=None):
    """What a model computes before and after training, and after it was saved and loaded."""
    ids, labels = batch()
    if kind in ("all2all", "fused") if four_axes is None else four_axes:
        ids, labels = ids[:, np.newaxis], labels[:, np.newaxis]  # [batch, 1, length]
    if head != "loss":
        labels = labels[:, 0]
    ids = tf.constant(np.where(ids == 0, "", ids.astype(str)) if kind == "strings" else ids)
    model = make("all2all" if kind == "fused" else kind, head, way, ids)
    if kind == "fused":
        model = sok.fuse_lookups(model)
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer = optimizer if kind == "stock" else sok.OptimizerWrapper(optimizer)
    model.compile(optimizer, "mse", weighted_metrics=["mae"], run_eagerly=kind not in TRACED)
    found = {
        "before": model(ids).numpy(),
        "evaluated": model.evaluate(ids, labels, batch_size=BATCH, verbose=0),
    }
    current = comm.current()
    share = BATCH // current.world_size if kind != "stock" else BATCH
    mine = slice(share * current.rank, share * (current.rank + 1))
    model.fit(ids[mine], labels[mine], batch_size=share, epochs=3, shuffle=False, verbose=0)
    found["after"] = model.predict(ids, verbose=0)
    if kind == "stock":
        return found
    if way == "subclass":
        model.save_weights(folder / "m.weights.h5")
        loaded = make(kind, head, way, ids)
        loaded.load_weights(folder / "m.weights.h5")
    else:
        model.save(folder / "m.keras")
        loaded = tf.keras.models.load_model(folder / "m.keras")
    found["loaded"] = loaded(ids).numpy()
    return found


@functools.cache
def stock(head, way, four_axes):
    return trained("stock", head, way, four_axes=four_axes)


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("kind, head, way", CASES)
def test_as_stock_models_with_a_mask(on_threads, tmp_path, kind, head, way):
    results = on_threads(1 if kind == "dense" else 2, trained, kind, head, way, tmp_path)
    expected = stock(head, way, kind in ("all2all", "fused"))
    for found in results:
        for what in ("before", "evaluated", "after"):
            np.testing.assert_allclose(found[what], expected[what], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["loaded"], found["after"], rtol=1e-5, atol=1e-6)
    assert np.abs(expected["after"] - expected["before"]).max() > 0.01


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_parallel_input(on_threads, world_size):
    """Masks of outputs on one rank, where inputs come table after table; errors on several."""

    def check():
        stock, masked = tf.keras.layers.Embedding(9, 2), sok.HashEmbedding(2, pad_key=0)
        combined = sok.HashEmbedding(2, "sum", pad_key=0)
        stock_masked = tf.keras.layers.Embedding(9, 2, mask_zero=True)
        ids = [tf.constant([[1, 0]]), tf.constant([[0, 3]])]
        for layers in ([combined, stock_masked], [stock, masked]):
            if world_size > 1:
                name = rf"embeddings.1.: {type(layers[1]).__name__}"
                with pytest.raises(ValueError, match=f"must not make masks.*{name}"):
                    dmp.DistributedEmbedding(layers, dp_input=False)
                continue
            layer = dmp.DistributedEmbedding(layers, dp_input=False)
            outputs = layer([ids[i] for i in layer.strategy.input_ids_list[0]])
            none, mask = (getattr(output, "_keras_mask", None) for output in outputs)
            assert none is None and mask.numpy().tolist() == [[False, True]]

    on_threads(world_size, check)


def test_a_layer_that_loses_the_mask_warns(sok):
    """Of Keras 3 it is Keras' own warning; tf_keras has none."""
    rows = sok.All2AllDenseEmbedding(None, 4, slot_num=1, nnz_per_slot=3, pad_key=0)
    ids = tf.constant([[[5, 7, 0]]], tf.int64)
    layer = tf.keras.layers.Reshape([3, 4], name="flat")
    with pytest.warns(UserWarning, match="Layer 'flat' .of type Reshape.*not support masking"):
        layer(rows(ids))
    inputs = tf.keras.Input([1, 3], dtype="int64")
    with pytest.warns(UserWarning, match="not support masking"):
        model = tf.keras.Model(inputs, tf.keras.layers.Reshape([3, 4])(rows(inputs)))
        model(ids)
    with warnings.catch_warnings():  # nothing is lost here
        warnings.simplefilter("error")
        tf.keras.layers.Activation("tanh")(rows(ids))
        tf.keras.layers.Reshape([3, 4])(tf.zeros([1, 1, 3, 4]))
