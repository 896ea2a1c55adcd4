"""An exported model of 26 features, served, against the same model of stock Keras layers.

Both are SavedModels of stock ops, loaded and called as a server does. The peer finds a key by
`IntegerLookup`, whose vocabulary is fixed, and its row by `Embedding`.
"""

from __future__ import annotations

import tempfile

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks.harness import Contender, Match

FEATURES, DIM = 26, 16
PEER = "IntegerLookup, Embedding"
NAMES = [f"feature_{number}" for number in range(FEATURES)]


def served(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """One row, which a client waits for, and a batch."""
    random = np.random.default_rng(0)
    keys = [random.integers(0, 2**60, 200 if quick else 2_000) for _ in NAMES]
    rows = [random.normal(size=[len(k), DIM]).astype(np.float32) for k in keys]
    models = {"ours": _ours(keys, rows), PEER: _stock(keys, rows)}
    contenders, matches = {}, []
    for batch, target in ((1, 1.2), (1_000, 1.0)):
        feeds = [_feed(keys, batch, random) for _ in range(8)]
        scores = [_score(model, feeds[0]).numpy() for model in models.values()]
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-3)
        for name, model in models.items():
            contenders[f"{name}, {batch}"] = Contender(
                lambda i, model=model, feeds=feeds: _score(model, feeds[i % len(feeds)]).numpy(),
                warm_up=20,
            )
        name = "served row" if batch == 1 else f"served batch {batch:,}"
        matches.append(Match(name, f"ours, {batch}", f"{PEER}, {batch}", target))
    return contenders, matches


def _feed(keys, batch, random):
    return {n: tf.constant(random.choice(k, batch)) for n, k in zip(NAMES, keys, strict=True)}


def _score(model, feed):
    (score,) = model.signatures["serving_default"](**feed).values()
    return score


def _top(inputs, rows):
    dense = tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    return tf.keras.Model(inputs, dense(tf.keras.layers.Concatenate()(rows)))


def _inputs():
    return {name: tf.keras.Input([], dtype="int64", name=name) for name in NAMES}


def _ours(keys, rows):
    inputs = _inputs()
    layer = sok.GroupEmbedding(dict.fromkeys(NAMES, DIM), name="served")
    found = layer(inputs)
    model = _top(inputs, [found[name] for name in NAMES])
    for name, k, r in zip(NAMES, keys, rows, strict=True):
        sok.assign(layer.tables[name], k, r)
    with tempfile.TemporaryDirectory() as folder:
        sok.export_saved_model(model, folder)
        return tf.saved_model.load(folder)


def _stock(keys, rows):
    inputs, found = _inputs(), []
    for name, k, r in zip(NAMES, keys, rows, strict=True):
        numbers = tf.keras.layers.IntegerLookup(vocabulary=k.tolist())(inputs[name])
        embedding = tf.keras.layers.Embedding(len(k) + 1, DIM)
        found.append(embedding(numbers))
        embedding.set_weights([np.concatenate([np.zeros([1, DIM], np.float32), r])])
    model = _top(inputs, found)
    specs = {name: tf.TensorSpec([None], tf.int64, name=name) for name in NAMES}
    serve = tf.function(lambda feed: {"score": model(feed, training=False)}, [specs])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, folder, signatures=serve)
        return tf.saved_model.load(folder)
