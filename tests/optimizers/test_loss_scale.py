"""Dynamic loss scaling around an embedding-aware optimizer."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras

SCALE = 1024.0
INFINITE = (float("inf"), float("-inf"))
keras_3_only = pytest.mark.skipif(not is_keras_3(), reason="tf_keras scales by itself")


@pytest.fixture(autouse=True)
def initialized():
    sok.Init(global_batch_size=4, seed=3)


def make(inner=None):
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True)
    dense = tf.Variable([1.0, -1.0])
    inner = inner or tf.keras.optimizers.SGD(0.5)
    kinds = tf.keras.optimizers if is_keras_3() else tf.keras.mixed_precision
    optimizer = kinds.LossScaleOptimizer(inner, initial_scale=SCALE)
    return layer, dense, sok.OptimizerWrapper(optimizer)


def step(layer, dense, optimizer, factor):
    keys = tf.constant([5, 6], tf.int64)
    variables = [*layer.trainable_variables, dense]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys)) * 3.0 + tf.reduce_sum(dense) * factor
        scaled = optimizer.scale_loss(loss)
    optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))


@keras_3_only
@pytest.mark.parametrize("by", ["LossScaleOptimizer", "loss_scale_factor"])
def test_gradients_are_unscaled_for_both_kinds_of_variable(by):
    layer, dense, optimizer = make()
    if by == "loss_scale_factor":
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5, loss_scale_factor=SCALE))
    before = layer(tf.constant([5, 6], tf.int64)).numpy()
    step(layer, dense, optimizer, 2.0)
    after = layer(tf.constant([5, 6], tf.int64)).numpy()
    np.testing.assert_allclose(after, before - 0.5 * 3.0, rtol=1e-6)
    np.testing.assert_allclose(dense.numpy(), [0.0, -2.0], rtol=1e-6)


@keras_3_only
def test_a_step_that_is_not_finite_changes_nothing_but_the_scale():
    layer, dense, optimizer = make()
    step(layer, dense, optimizer, 2.0)
    before, weights = layer(tf.constant([5, 6], tf.int64)).numpy(), dense.numpy()
    step(layer, dense, optimizer, float("inf"))
    np.testing.assert_array_equal(layer(tf.constant([5, 6], tf.int64)), before)
    np.testing.assert_array_equal(dense, weights)
    assert float(optimizer.dynamic_scale) == SCALE / 2


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("parts", "skipped"), [((3e38, 3e38), True), ((3e38, -3e38), False), (INFINITE, True)]
)
def test_the_sum_of_several_lookups_must_be_finite(parts, skipped, in_graph):
    layer, _, optimizer = make()
    table = layer.trainable_variables[0]
    keys = tf.constant([5, 6], tf.int64)
    before = layer(keys).numpy()

    def take():
        gradients = [tf.IndexedSlices(tf.fill([2, 2], part), keys) for part in parts]
        # What TensorFlow makes of two lookups' gradients.
        both = tf.IndexedSlices(tf.concat([g.values for g in gradients], 0), tf.tile(keys, [2]))
        optimizer.apply_gradients([(both, table)])

    (tf.function(take) if in_graph else take)()
    scale = optimizer.dynamic_scale if is_keras_3() else optimizer.loss_scale
    assert float(scale) == (SCALE / 2 if skipped else SCALE)
    np.testing.assert_array_equal(layer(keys), before)


@pytest.mark.ranks
def test_ranks_skip_a_step_together(rank_results):
    ranks = rank_results(2, "loss_scale.infinities")
    for door in ranks[0]:
        for result in ranks:
            rows, weights, scales = zip(*result[door], strict=True)
            assert scales == (SCALE, SCALE, SCALE / 2, SCALE / 4, SCALE / 4), door
            for skipped in (2, 3):
                np.testing.assert_array_equal(rows[skipped], rows[1], str(door))
            # A mean over ranks of 1 and 2, twice; the rows move as far in the last step as first.
            for moved, weight in enumerate((0.0, 0.75, 0.75, 0.75, 1.5)):
                np.testing.assert_allclose(weights[moved], [1 - weight, -1 - weight], atol=1e-6)
            assert (rows[1] < rows[0]).all()
            np.testing.assert_allclose(rows[4] - rows[1], rows[1] - rows[0], atol=1e-5)


@keras_3_only
def test_compile_names_the_way_under_mixed_float16():
    policy = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy("mixed_float16")
    try:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam())
        with pytest.raises(ValueError, match="LossScaleOptimizer\\(optimizer\\)"):
            model.compile(optimizer=optimizer, loss="mse")
    finally:
        tf.keras.config.set_dtype_policy(policy)
