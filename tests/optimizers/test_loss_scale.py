"""Dynamic loss scaling around an embedding-aware optimizer."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from tests.training import train_step

pytestmark = pytest.mark.keras

SCALE = 1024.0


def _stock():
    return tf.keras.optimizers.SGD(0.5)


def _scaling(inner):
    return tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=SCALE)


def _doors():
    """How a program may put loss scaling around an optimizer that knows tables."""
    own = {"of_sok_tables": _stock()}
    doors = {
        "sok": lambda: sok.OptimizerWrapper(_scaling(_stock())),
        "sok_tables": lambda: sok.OptimizerWrapper(own, default=_scaling(_stock())),
    }
    if is_keras_3():
        doors["dmp"] = lambda: dmp.DistributedOptimizer(_scaling(_stock()))
        return doors
    legacy = tf.keras.optimizers.legacy.SGD
    return doors | {
        "sok_inside": lambda: _scaling(sok.OptimizerWrapper(_stock())),
        "sok_legacy": lambda: sok.OptimizerWrapper(_scaling(legacy(0.5))),
        "dmp": lambda: _scaling(dmp.DistributedOptimizer(_stock())),
        "dmp_legacy": lambda: _scaling(dmp.DistributedOptimizer(legacy(0.5))),
    }


def check_doors():
    """By door: rows, weights and the scale after each of four steps, of which two overflow."""
    for door, make_optimizer in _doors().items():
        as_function = tf.function if door in ("sok", "dmp") else lambda function: function
        _check_four_steps(door, make_optimizer(), as_function)
    if is_keras_3():
        with pytest.raises(ValueError, match="decides on each rank separately"):
            _scaling(dmp.DistributedOptimizer(_stock()))
    else:
        with pytest.raises(TypeError, match="must be around the DistributedOptimizer"):
            dmp.DistributedOptimizer(_scaling(_stock()))


def _check_four_steps(door, optimizer, as_function):
    rank = comm.current().rank
    dense = tf.Variable([1.0, -1.0])
    if door.startswith("dmp"):
        tables = [dmp.Embedding(8, 2, embeddings_initializer="ones") for _ in range(2)]
        layer = dmp.DistributedEmbedding(tables, "memory_balanced")
    else:
        layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name=f"of_{door}")

    def look_up(keys):
        return tf.concat(layer([keys[:, None]] * 2), 0) if door.startswith("dmp") else layer(keys)

    @as_function
    def step(keys, of_rows, of_dense):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(keys)) * of_rows + tf.reduce_sum(dense) * of_dense
            scaled = (optimizer.scale_loss if is_keras_3() else optimizer.get_scaled_loss)(loss)
        variables = [*layer.trainable_variables, dense]
        gradients = tape.gradient(scaled, variables)
        if not is_keras_3():
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    keys = tf.constant([5, 6], tf.int64)
    look_up(keys)
    infinite = float("inf")
    seen = [(look_up(keys).numpy(), dense.numpy(), SCALE)]
    for of_rows, of_dense in (
        (3.0, 1.0 + rank),
        (3.0, infinite if rank == 1 else 2.0),
        (infinite if rank == 1 else 3.0, 2.0),  # of key 6, which one rank holds
        (3.0, 1.0 + rank),
    ):
        only = keys if np.isfinite(of_rows) else keys[1:]
        step(only, tf.constant(of_rows), tf.constant(of_dense))
        scale = optimizer.dynamic_scale if is_keras_3() else optimizer.loss_scale
        seen.append((look_up(keys).numpy(), dense.numpy(), float(scale)))
    rows, weights, scales = zip(*seen, strict=True)
    assert scales == (SCALE, SCALE, SCALE / 2, SCALE / 4, SCALE / 4), door
    for skipped in (2, 3):
        np.testing.assert_array_equal(rows[skipped], rows[1], door)
    # A mean over ranks of 1 and 2, twice; the rows move as far in the last step as first.
    for moved, weight in enumerate((0.0, 0.75, 0.75, 0.75, 1.5)):
        np.testing.assert_allclose(weights[moved], [1 - weight, -1 - weight], atol=1e-6)
    assert (rows[1] < rows[0]).all()
    np.testing.assert_allclose(rows[4] - rows[1], rows[1] - rows[0], atol=1e-5)


INFINITE = (float("inf"), float("-inf"))
keras_3_only = pytest.mark.skipif(not is_keras_3(), reason="tf_keras scales by itself")


@pytest.fixture(autouse=True)
def initialized():
    sok.Init(global_batch_size=4, seed=3)


@pytest.fixture
def layer():
    return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True)


@keras_3_only
def test_gradients_are_unscaled_for_both_kinds_of_variable(layer):
    dense = tf.Variable([1.0, -1.0])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5, loss_scale_factor=SCALE))
    keys = tf.constant([5, 6], tf.int64)
    before = layer(keys).numpy()

    def scaled_loss():
        return optimizer.scale_loss(tf.reduce_sum(layer(keys)) * 3.0 + tf.reduce_sum(dense) * 2.0)

    train_step(optimizer, [*layer.trainable_variables, dense], scaled_loss)
    np.testing.assert_allclose(layer(keys), before - 0.5 * 3.0, rtol=1e-6)
    np.testing.assert_allclose(dense.numpy(), [0.0, -2.0], rtol=1e-6)


@pytest.mark.parametrize(
    "parts, skipped, in_graph",
    [((3e38, 3e38), True, True), ((3e38, -3e38), False, True), (INFINITE, True, False)],
)
def test_the_sum_of_several_lookups_must_be_finite(layer, parts, skipped, in_graph):
    optimizer = _doors()["sok"]()
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


def test_ranks_skip_a_step_together(on_threads):
    on_threads(2, check_doors)
