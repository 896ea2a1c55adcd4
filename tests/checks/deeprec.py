"""DeepRec's strategy in a session: ordinary variables that start apart, and a table."""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
STEPS, BATCH, RATE = 5, 4, 0.1


def checks(world_size):
    """A check for each optimizer of a program that has one for all, and one for each part."""
    return {"together": lambda: train(apart=False), "apart": lambda: train(apart=True)}


def data(rank):
    """Features, keys and targets of a rank, and the weights with which it starts."""
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((BATCH, 3)).astype(np.float32)
    keys = rng.integers(0, 5, BATCH)
    y = rng.standard_normal((BATCH, 1)).astype(np.float32)
    return x, keys, y, rng.standard_normal((3, 1)).astype(np.float32)


def train(apart):
    """The weights and rows before each step."""
    import sok_like as sok

    strategy = sok.deeprec.CollectiveStrategy()
    try:
        with strategy.scope(), tf.Graph().as_default():
            return _train(strategy, apart)
    finally:
        sok.deeprec.uninstall()


def _train(strategy, apart):
    x, keys, y, start = data(strategy.rank())
    with strategy.embedding_scope():
        table = tf.get_embedding_variable(f"bias{apart}", 1, initializer=tf.ones_initializer())
        ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys), [1] * BATCH)
        (rows,) = tf.nn.group_embedding_lookup_sparse([table], [ids], ["sum"])
    weights = v1.get_variable("w", initializer=start)
    loss = tf.reduce_mean((tf.matmul(tf.constant(x), weights) + rows - y) ** 2)
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.GradientDescentOptimizer(RATE)
    if apart:
        dense = optimizer.minimize(loss, step, var_list=[weights])
        with tf.control_dependencies([dense]):
            other = v1.train.GradientDescentOptimizer(RATE)
            operation = other.minimize(loss, var_list=[table])
    else:
        operation = optimizer.minimize(loss, step)
    found = []
    with v1.train.MonitoredTrainingSession(hooks=[v1.train.StopAtStepHook(STEPS)]) as session:
        while not session.should_stop():
            found.append(session.run([weights, rows]))
            session.run(operation)
    return found
