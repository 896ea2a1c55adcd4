"""Lookups with `training=False`: they find each key by itself, and have a gradient all the same."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from sok_like.lookup.hash_lookup import HashFeature, lookup

DIM = 4
PRESENT = np.arange(0, 40, 2)


def filled(sok, name, **options):
    table = sok.EmbeddingVariable(DIM, name=name, **options)
    sok.assign(table, PRESENT, np.random.default_rng(3).random((len(PRESENT), DIM), np.float32))
    return table


def batch(seed, size=50, hotness=6):
    """Keys, half of them present and many repeated, of samples some of which are empty."""
    rng = np.random.default_rng(seed)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, hotness, size))])
    weights = rng.integers(1, 9, splits[-1]).astype(np.float32) / 4
    return rng.integers(0, 40, splits[-1]), splits, weights


def combined(rows, splits, weights, combiner):
    """NumPy, float64."""
    if combiner == "none":
        return rows * weights[:, None]
    found = np.zeros([len(splits) - 1, DIM])
    for s, (begin, end) in enumerate(itertools.pairwise(splits)):
        w = weights[begin:end]
        divisor = {"sum": 1, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
        if begin < end:
            found[s] = (w[:, None] * rows[begin:end]).sum(0) / divisor
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("owing", [False, True])
def test_each_key_reads_its_row(sok, weighted, owing):
    table = filled(sok, "read")
    if owing:  # Adam's rows with momentum move at each step, also those that it does not name
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
        for keys in (PRESENT, PRESENT[:2], PRESENT[:2]):
            with tf.GradientTape() as tape:
                (rows,) = lookup([HashFeature(table, tf.constant(keys))], training=True)
                loss = tf.reduce_sum(rows * rows)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    keys, splits, weights = batch(1)
    # `find` gives rows by key; what is missing reads its initial row.
    rows = table.find(tf.constant(keys))[0].numpy().astype(np.float64)
    features = [
        HashFeature(
            table,
            tf.constant(keys),
            combiner,
            None if combiner == "none" else tf.constant(splits),
            tf.constant(weights) if weighted else None,
        )
        for combiner in ("none", "sum", "mean", "sqrtn")
    ]
    size = table.size().numpy()
    found = lookup(features, training=False)
    given = weights if weighted else np.ones_like(weights)
    for feature, got in zip(features, found, strict=True):
        right = combined(rows, splits, given, feature.combiner)
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-7)
    assert table.size().numpy() == size


@pytest.mark.parametrize("combiner", ["none", "sum", "mean"])
def test_gradients_are_those_of_a_training_lookup(sok, combiner):
    keys, splits, weights = batch(2)
    upstream = np.random.default_rng(5).standard_normal(
        (len(keys) if combiner == "none" else len(splits) - 1, DIM)
    )
    table = filled(sok, "gradient")
    feature = HashFeature(
        table,
        tf.constant(keys),
        combiner,
        None if combiner == "none" else tf.constant(splits),
        tf.constant(weights),
    )

    @tf.function(autograph=False)
    def gradient(training):
        with tf.GradientTape() as tape:
            (rows,) = lookup([feature], training=training)
        return tape.gradient(rows, table, output_gradients=tf.constant(upstream, tf.float32))

    found = gradient(False)
    one_hot = keys[:, None] == np.unique(keys)
    # Every combiner is linear in the rows: its matrix is what it makes of unit rows.
    matrix = np.stack(
        [
            combined(np.tile(c[:, None], DIM), splits, weights, combiner)[:, 0]
            for c in one_hot.T * 1.0
        ]
    )
    order = np.argsort(found.indices)
    np.testing.assert_array_equal(found.indices.numpy()[order], np.unique(keys))
    np.testing.assert_allclose(found.values.numpy()[order], matrix @ upstream, rtol=1e-5, atol=1e-6)
    assert table.size().numpy() == len(PRESENT)
    trained = gradient(True)
    np.testing.assert_array_equal(found.indices, trained.indices)
    np.testing.assert_array_equal(found.values, trained.values)
