"""Clipping by hand where each rank has its own keys and its own part of the batch."""

import numpy as np
import tensorflow as tf

DIM, LIMIT, RATE = 3, 0.05, 1.0
KEYS = [[1, 2, 2, 5], [2, 4, 1, 1]]  # of each rank; one process has both
KERNEL = np.array([0.5, -1.0, 2.0], np.float32)
MODES = ("eager", "function")


def ramp(shape, dtype=None):
    """The row of each key is another one."""
    return (np.arange(np.prod(shape)).reshape(shape) / 10).astype(np.float32)


ROWS = ramp((6, DIM))


def checks(world_size):
    return {"clipped": clipped, "with_distribution": with_distribution, "tables": tables}


def with_distribution():
    """The same in a process that also shards variables, whose gradients have their own norms."""
    import sok_like.distribution.sharded_gradient  # noqa: F401 (registers functions for lists)

    return clipped()


def clipped():
    """Gradients of this rank's keys and of the kernel after each way to clip them, and the norm."""
    import sok_like as sok

    found = {}
    for name in ("by_global_norm", "global_norm", "by_norm", "tape_of_dmp"):
        for mode in MODES:
            layer = sok.All2AllDenseEmbedding(
                None, DIM, 1, 1, dynamic_input=True, gradient_scale="mean",
                embedding_initializer=ramp, name=f"{name}_{mode}",
            )  # fmt: skip
            found[f"{name} {mode}"] = _clipped(layer, name, mode)
    return found


def _clipped(layer, name, mode):
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    kernel = tf.Variable(KERNEL)
    keys = np.array(KEYS) if sok.size() == 1 else np.array(KEYS[sok.rank()])
    variables = [layer.embedding_variable, kernel]

    def gradients(keys):
        with tf.GradientTape() as tape:
            tape = dmp.DistributedGradientTape(tape) if name == "tape_of_dmp" else tape
            loss = tf.reduce_mean(tf.reduce_sum(layer(keys, training=True) * kernel, -1))
        pair = tape.gradient(loss, variables)
        if name == "by_norm":
            return [tf.clip_by_norm(pair[0], LIMIT), pair[1]], tf.constant(0.0)
        if name == "global_norm":
            return pair, tf.linalg.global_norm(pair)
        return tf.clip_by_global_norm(pair, LIMIT)

    call = tf.function(gradients) if mode == "function" else gradients
    (of_rows, of_kernel), norm = call(tf.constant(keys.ravel(), tf.int64))
    rows = dict(zip(of_rows.indices.numpy().tolist(), of_rows.values.numpy(), strict=True))
    return rows, of_kernel.numpy(), float(norm)


def tables():
    """Norm of the gradients of two dense tables, on 2 ranks one on each, by the modes."""
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    embeddings = [tf.keras.layers.Embedding(rows, DIM) for rows in (6, 8)]
    layer = dmp.DistributedEmbedding(embeddings, strategy="basic")
    keys = np.array(KEYS) if sok.size() == 1 else np.array(KEYS[sok.rank()])
    keys = tf.constant(keys.ravel(), tf.int64)
    layer([keys, keys])
    layer.set_weights([ROWS, ramp((8, DIM))])

    def gradients(keys):
        with tf.GradientTape() as tape:
            tape = dmp.DistributedGradientTape(tape)
            outputs = tf.concat(layer([keys, keys]), -1)
            loss = tf.reduce_mean(tf.reduce_sum(outputs**2, -1))
        return tape.gradient(loss, layer.trainable_variables)

    def norm(keys, gradients=gradients):
        return tf.linalg.global_norm(gradients(keys))

    outside = norm(keys, tf.function(gradients))  # of what the function has returned
    return float(norm(keys)), float(tf.function(norm)(keys)), float(outside)
