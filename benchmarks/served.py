"""A model of 26 features that answers, against the same model of stock Keras layers.

The peer finds a key by `IntegerLookup`, whose vocabulary is fixed, and its row by `Embedding`.
Served, both are SavedModels of stock ops, loaded and called as a server does.
"""

from __future__ import annotations

import tempfile

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks.harness import Contender, Match

FEATURES, DIM = 26, 16
PEER, BARE = "IntegerLookup, Embedding", "Embedding alone"
NAMES = [f"feature_{number}" for number in range(FEATURES)]


def served(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """One row, which a client waits for, and a batch."""
    keys, rows, random = _content(quick)
    models = {"ours": _loaded(_ours(keys, rows)), PEER: _loaded(_stock(keys, rows), stock=True)}
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


def predict_row(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """`predict_on_batch` of one row, in the process that trains; also with numbers for keys."""
    keys, rows, random = _content(quick)
    models = {"ours": _ours(keys, rows), PEER: _stock(keys, rows), BARE: _stock(keys, rows, False)}
    chosen = [{n: random.integers(0, len(keys[0]), 1) for n in NAMES} for _ in range(8)]
    as_keys = [{n: k[row[n]] for n, k in zip(NAMES, keys, strict=True)} for row in chosen]
    feeds = {"ours": as_keys, PEER: as_keys, BARE: chosen}
    contenders = {
        name: Contender(
            lambda i, model=model, feeds=feeds[name]: model.predict_on_batch(feeds[i % len(feeds)]),
            warm_up=20,
        )
        for name, model in models.items()
    }
    scores = [contender.call(0) for contender in contenders.values()]
    for score in scores[1:]:
        np.testing.assert_allclose(score, scores[0], rtol=1e-4, atol=1e-3)
    return contenders, [
        Match("predict_on_batch, 1 row", "ours", peer, 1.0) for peer in (PEER, BARE)
    ]


def _content(quick):
    random = np.random.default_rng(0)
    keys = [random.integers(0, 2**60, 200 if quick else 2_000) for _ in NAMES]
    return keys, [random.normal(size=[len(k), DIM]).astype(np.float32) for k in keys], random


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
    return model


def _stock(keys, rows, of_keys=True):
    """The peer, or without `IntegerLookup` a model that is asked for the numbers of keys."""
    inputs, found = _inputs(), []
    for name, k, r in zip(NAMES, keys, rows, strict=True):
        numbers = inputs[name]
        if of_keys:
            numbers = tf.keras.layers.IntegerLookup(vocabulary=k.tolist())(numbers)
            r = np.concatenate([np.zeros([1, DIM], np.float32), r])
        embedding = tf.keras.layers.Embedding(len(r), DIM)
        found.append(embedding(numbers))
        embedding.set_weights([r])
    return _top(inputs, found)


def _loaded(model, stock=False):
    """The SavedModel of a model."""
    with tempfile.TemporaryDirectory() as folder:
        if stock:
            specs = {name: tf.TensorSpec([None], tf.int64, name=name) for name in NAMES}
            serve = tf.function(lambda feed: {"score": model(feed, training=False)}, [specs])
            tf.saved_model.save(model, folder, signatures=serve)
        else:
            sok.export_saved_model(model, folder)
        return tf.saved_model.load(folder)
