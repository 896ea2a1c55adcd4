"""A v1 graph of a table under an ordinary weight, and the batches that train it."""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
KEYS = np.array([[1, 2**50], [3, 1], [-5, 7], [7, 7]], np.int64)
TARGETS = np.array([0.3, -0.2, 0.5, 0.1], np.float32)


def batch(step):
    order = np.random.default_rng(step).permutation(4)[: 4 if step % 3 else 2]
    return KEYS[order], TARGETS[order]


def build(sok):
    """Placeholders, the loss, the layer and an ordinary weight."""
    layer = sok.DistributedEmbedding("sum", None, 3, slot_num=2, max_nnz=1, name="fields")
    keys = v1.placeholder(tf.int64, [None, 2])
    targets = v1.placeholder(tf.float32, [None])
    weight = v1.get_variable("weight", [6], initializer=v1.ones_initializer())
    output = tf.linalg.matvec(tf.reshape(layer(keys, training=True), [-1, 6]), weight)
    loss = tf.reduce_mean((output - targets) ** 2)
    return keys, targets, loss, layer, weight
