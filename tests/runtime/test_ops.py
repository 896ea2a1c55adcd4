"""Whether the ops report that the keys of their gradients are unique."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras


@pytest.fixture
def layer(sok):
    return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="users")


@pytest.fixture
def told(monkeypatch):
    """`keys_are_unique` of each call of the optimizer's op."""
    calls = []
    real = libraries.ops().sok_apply_gradients

    def spy(**arguments):
        calls.append(arguments["keys_are_unique"])
        return real(**arguments)

    monkeypatch.setattr(libraries.ops(), "sok_apply_gradients", spy)
    return calls


def step(optimizer, layer, *batches):
    """One step of plain SGD at rate 1: each key's row moves by how often the batches have it."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(layer(tf.constant(batch, tf.int64))) for batch in batches])
    variable = layer.embedding_variable
    optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    "batches, unique", [([[1, 5, 1]], True), ([[1, 5, 1], [5, 7]], False), ([[]], True)]
)
def test_one_lookup_has_each_key_once(sok, layer, told, in_function, batches, unique):
    keys = tf.constant([1, 5, 7], tf.int64)
    before = layer(keys, training=False).numpy()
    run = tf.function(step) if in_function else step
    run(sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0)), layer, *batches)
    assert told == [unique]
    counts = [sum(batch.count(key) for batch in batches) for key in (1, 5, 7)]
    moved = before - layer(keys, training=False).numpy()
    np.testing.assert_allclose(moved, np.transpose([counts, counts]), atol=1e-6)


def test_gradients_of_the_caller_may_repeat(sok, layer, told):
    key = tf.constant([3], tf.int64)
    before = layer(key, training=False).numpy()
    repeated = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([3, 3], tf.int64))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(repeated, layer.embedding_variable)])
    assert told == [False]
    np.testing.assert_allclose(before - layer(key, training=False).numpy(), [[2, 2]], atol=1e-6)


def test_keys_of_all_ranks_are_merged(sok, on_threads):
    def check():
        layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="users")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([1, 2, 1, 3], tf.int64)))
        gradient = tape.gradient(loss, layer.embedding_variable)
        assert getattr(gradient.indices, comm.UNIQUE)
        assert sorted(gradient.indices.numpy()) == ([1, 3] if sok.rank() else [2])

    on_threads(2, check)
