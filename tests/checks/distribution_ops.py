"""TensorFlow's ops of a sharded variable, on 2 ranks, against those of an ordinary one."""

import numpy as np
import tensorflow as tf

from tests.checks import Alone
from tests.checks.distribution_use import under


def checks(world_size):
    return {"operations": operations} if world_size == 2 else {}


# Of a kernel with two rows and of inputs [4, 3]. A shard has one row: taken for the whole it would
# be broadcast, or summed, without an error.
OPERATIONS = {
    "*": lambda kernel, x: x[:2] * kernel,
    "* from the left": lambda kernel, x: kernel * x[:2],
    "tf.multiply": lambda kernel, x: tf.multiply(x[:2], kernel),
    "raw_ops.Mul": lambda kernel, x: tf.raw_ops.Mul(x=x[:2], y=kernel),
    "reduce_sum": lambda kernel, x: tf.reduce_sum(kernel),
    "l2_loss": lambda kernel, x: tf.nn.l2_loss(kernel),
    "square": lambda kernel, x: tf.square(kernel),
    "maximum": lambda kernel, x: tf.maximum(x[:2], kernel),
    "concat": lambda kernel, x: tf.concat([kernel, x], 0),
    "matmul": lambda kernel, x: tf.matmul(x, kernel, transpose_b=True),
    "gather": lambda kernel, x: tf.gather(kernel, [1, 0, 1]),
}


def _operations(dist=None):
    tf.keras.utils.set_random_seed(9)
    layer = tf.keras.layers.Dense(3, use_bias=False, name="cut")
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), layer])
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer = optimizer if dist is None else dist.distribution().optimizer(optimizer)
    x, found = tf.constant(np.random.default_rng(2).normal(size=[4, 3]), tf.float32), {}
    for name, operation in OPERATIONS.items():

        def step(of=operation):
            with tf.GradientTape() as tape:
                value = of(layer.kernel, x)
                loss = tf.reduce_sum(value**2)
            gradient = tape.gradient(loss, layer.kernel)
            optimizer.apply_gradients([(gradient, layer.kernel)])
            return value

        for how, call in {"eagerly": step, "in a function": tf.function(step)}.items():
            found[f"{name} {how}"] = call().numpy()
    return {**found, "weights": [v.numpy() for v in model.weights]}


def operations():
    """Each op eagerly and in a function, and steps by the gradients."""
    return {
        "oracle": Alone(_operations),
        "sharded": under((1, 2), _operations, {"cut/kernel": ("model", None)}),
    }
