"""Programs for SOK 1.x on one and two ranks: stock optimizers in a scope, a dump."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.sok1 import DUMP_KEYS, DUMP_ROWS, FILE_KEYS, ROWS, STEPS, WEIGHT

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dump_is_spread_over_the_ranks(rank_results, world_size):
    for rank, (status, keys, rows) in enumerate(rank_results(world_size, "sok1.dump")):
        mine = DUMP_KEYS % world_size == rank
        order = np.argsort(DUMP_KEYS[mine])
        assert status == b"OK"
        np.testing.assert_array_equal(keys, DUMP_KEYS[mine][order])
        np.testing.assert_array_equal(rows, DUMP_ROWS[mine][order])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dump_holds_the_files_that_sok_wrote(rank_results, world_size):
    for keys, rows, files in rank_results(world_size, "sok1.files"):
        order, expected = np.argsort(keys), np.argsort(FILE_KEYS)
        np.testing.assert_array_equal(keys[order], FILE_KEYS[expected])
        np.testing.assert_array_equal(rows[order], DUMP_ROWS[expected])
        assert files == ["filed_keys.file", "filed_values.file"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_stock_optimizers_in_a_scope(rank_results, world_size):
    rows, weight = tf.Variable(ROWS), tf.Variable(WEIGHT)
    optimizers = [tf.keras.optimizers.Adam(0.1) for _ in range(2)]
    for keys in STEPS:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.gather(rows, [*keys[0], *keys[1]]) ** 2)
        gradients = tape.gradient(loss, [rows, weight])
        for optimizer, gradient, variable in zip(
            optimizers, gradients, [rows, weight], strict=True
        ):
            # Keras 3 would square the parts of a row's gradient one by one.
            optimizer.apply_gradients([(tf.convert_to_tensor(gradient), variable)])
    for status, found, found_weight in rank_results(world_size, "sok1.scope"):
        assert status == b"OK"
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=5e-6)
        np.testing.assert_allclose(found_weight, weight, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_adam_in_a_graph_of_tf_1(rank_results, world_size):
    rows, optimizer = tf.Variable(ROWS), tf.keras.optimizers.Adam(0.1)
    for keys in STEPS:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(rows, [*keys[0], *keys[1]]) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, rows))
        optimizer.apply_gradients([(gradient, rows)])
    for found in rank_results(world_size, "sok1.session"):
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_adam_begins_anew_on_rows_alone(rank_results, world_size):
    ranks = rank_results(world_size, "sok1.rows_only")
    for trained, restored, after in ranks:
        np.testing.assert_array_equal(restored, trained)
        # Adam's first step is the learning rate, whatever the gradient.
        np.testing.assert_allclose(after, trained - 0.1, atol=1e-5)
    assert sum(len(trained) for trained, _, _ in ranks) == 5
