"""A v1 graph of a table under an ordinary weight, and a training in a session."""

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tests.training import train_step

v1 = tf.compat.v1
STEPS = 12
KEYS = np.array([[1, 2**50], [3, 1], [-5, 7], [7, 7]], np.int64)
UNIQUE = np.unique(KEYS)
TARGETS = np.array([0.3, -0.2, 0.5, 0.1], np.float32)


def build(sok):
    """`sok.Init`'s op, placeholders, the loss, the layer and an ordinary weight."""
    init = sok.Init(global_batch_size=4, seed=2)
    layer = sok.DistributedEmbedding("sum", None, 3, slot_num=2, max_nnz=1, name="fields")
    keys = v1.placeholder(tf.int64, [None, 2])
    targets = v1.placeholder(tf.float32, [None])
    weight = v1.get_variable("weight", [6], initializer=v1.ones_initializer())
    output = tf.linalg.matvec(tf.reshape(layer(keys, training=True), [-1, 6]), weight)
    loss = tf.reduce_mean((output - targets) ** 2)
    return init, keys, targets, loss, layer, weight


def check_training(sok, make, minimize):
    """Steps of a session follow the stock optimizer that `make()` makes, on a dense table.

    `minimize(optimizer, loss, layer, weight)` makes the op of a step.
    """
    init, keys, targets, loss, layer, weight = build(sok)
    op = minimize(sok.OptimizerWrapper(make()), loss, layer, weight)
    read = layer.table.find(tf.constant(UNIQUE))[0]
    orders = [np.random.default_rng(n).permutation(4)[: 4 if n % 3 else 2] for n in range(STEPS)]
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        initial = session.run(read)
        for order in orders:
            session.run(op, {keys: KEYS[order], targets: TARGETS[order]})
        rows, trained = session.run([read, weight])
    with context.eager_mode():  # outside the graph that the fixture is building
        table, dense_weight, stock = tf.Variable(initial), tf.Variable(tf.ones([6])), make()
        for order in orders:

            def loss_of(order=order):
                # Keras' optimizers follow dense gradients; v1's leave absent rows alone.
                read = tf.gather if isinstance(stock, v1.train.Optimizer) else dense_gather
                found = tf.reshape(read(table, np.searchsorted(UNIQUE, KEYS[order])), [-1, 6])
                return tf.reduce_mean((tf.linalg.matvec(found, dense_weight) - TARGETS[order]) ** 2)

            train_step(stock, [table, dense_weight], loss_of)
        np.testing.assert_allclose(rows, table, rtol=0, atol=1e-5)
        np.testing.assert_allclose(trained, dense_weight, rtol=0, atol=1e-5)
    assert np.abs(rows - initial).max() > 0.01


def dense_gather(table, numbers):
    """Its gradient is dense."""
    return tf.tensordot(tf.one_hot(numbers, len(UNIQUE)), table, 1)
