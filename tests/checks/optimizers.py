"""Steps of optimizers on ranks: all kinds of variables, keys met once."""

import numpy as np
import tensorflow as tf


def checks(world_size):
    return {"all_kinds": all_kinds, "one_lookup": one_lookup, "per_table": per_table}


def all_kinds():
    """A hash table, a dense table over ranks and replicated weights under one optimizer."""
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp
    from sok_like.runtime.ranks import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    hashed = sok.All2AllDenseEmbedding(
        None, 2, 1, 1, dynamic_input=True, gradient_scale="mean", embedding_initializer="zeros"
    )
    tables = [tf.keras.layers.Embedding(4, 2), tf.keras.layers.Embedding(4, 2)]
    dense = dmp.DistributedEmbedding(tables)
    dense.set_weights([np.zeros([4, 2]), np.zeros([4, 2])])
    weights = tf.Variable([0.0])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    ids = tf.constant([0, 1, 2, 3], tf.int64)[rank::world_size]  # every id once over all ranks
    factor = 4.0 / world_size  # the mean over ranks of a sum over a rank's share
    variables = [*hashed.trainable_variables, *dense.trainable_variables, weights]
    with tf.GradientTape() as tape:
        first, second = dense([ids, ids])  # unlike gradients: averaged, the tables would mix
        outputs = [hashed(ids), first, 3.0 * second]
        loss = sum(tf.reduce_sum(output) for output in outputs) * factor
        loss += weights[0] * float(rank + 1)
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    rows = hashed(tf.constant([0, 1, 2, 3], tf.int64), training=False).numpy()
    return {"hashed": rows, "dense": dense.get_weights(all_ranks=True), "weights": weights.numpy()}


def one_lookup():
    """Whether keys are known to be unique, how many there are, and how many different ones."""
    import sok_like as sok
    from sok_like.runtime import ops

    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="users")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 2, 1, 3], tf.int64)))
    gradient = tape.gradient(loss, layer.embedding_variable)
    keys = gradient.indices.numpy().tolist()
    return [ops.keys_are_unique(gradient), len(keys), len(set(keys))]


def per_table():
    """Rows and weights after `fit`; each table has its own optimizer, ranks share each batch."""
    import sok_like as sok

    keras, keys = tf.keras.optimizers, np.array([[1, 5], [2, 6], [1, 5], [3, 7]])
    targets = np.array([[1.0], [-1.0], [2.0], [0.5]], np.float32)
    tf.keras.utils.set_random_seed(3)
    inputs = {name: tf.keras.Input([], dtype="int64", name=name) for name in ("users", "items")}
    layer = sok.GroupEmbedding({"users": 2, "items": 2}, name="own_optimizers")
    both = tf.keras.layers.Concatenate()(list(layer(inputs).values()))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(both))
    schedule = keras.schedules.ExponentialDecay(0.05, 2, 0.5)
    own = {"users": sok.optimizers.RowWiseAdagrad(0.1), "items": keras.Adam(schedule)}
    model.compile(sok.OptimizerWrapper(own, default=keras.SGD(0.2)), "mse", jit_compile=False)
    mine = slice(sok.rank(), None, sok.size())
    features = dict(zip(inputs, keys[mine].T, strict=True))
    model.fit(features, targets[mine], batch_size=4 // sok.size(), epochs=3, verbose=0)
    found = {
        name: tf.nn.embedding_lookup(table, keys[:, number]).numpy()
        for number, (name, table) in enumerate(layer.tables.items())
    }
    return {**found, "kernel": model.layers[-1].get_weights()[0]}
