"""Loss scaling where one rank's gradients overflow: what each rank did, step by step."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm

SCALE = 1024.0


def checks(world_size):
    return {"infinities": infinities}


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


def infinities():
    """By door: rows, weights and the scale after each of four steps, of which two overflow."""
    found = {}
    for door, make_optimizer in _doors().items():
        found[door, "function"] = _four_steps(door, make_optimizer(), tf.function)
    found["sok", "eager"] = _four_steps("sok", _doors()["sok"](), lambda function: function)
    if is_keras_3():
        with pytest.raises(ValueError, match="decides on each rank separately"):
            _scaling(dmp.DistributedOptimizer(_stock()))
    elif not is_keras_3():
        with pytest.raises(TypeError, match="must be around the DistributedOptimizer"):
            dmp.DistributedOptimizer(_scaling(_stock()))
    return found


def _four_steps(door, optimizer, as_function):
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
    return seen
