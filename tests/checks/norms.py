"""Clipping by hand where each rank has its own keys and its own part of the batch."""

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks.drift import raised

DIM, LIMIT, RATE = 3, 0.05, 1.0
KEYS = [[1, 2, 2, 5], [2, 4, 1, 1]]  # of each rank; one process has both
OTHER = lambda keys: (keys + 1) % 6  # noqa: E731
KERNEL = np.array([0.5, -1.0, 2.0], np.float32)
MODES = ("eager", "function")


def ramp(shape, dtype=None):
    """The row of each key is another one."""
    return (np.arange(np.prod(shape)).reshape(shape) / 10).astype(np.float32)


ROWS = ramp((6, DIM))


def checks(world_size):
    every = {"clipped": clipped, "with_distribution": with_distribution, "tables": tables}
    every |= {"by_optimizers": by_optimizers, "without_norms": without_norms}
    return {**every, "several": several, "several_with_distribution": several_with_distribution}


def with_distribution():
    """The same in a process that also shards variables, whose gradients have their own norms."""
    import sok_like.distribution.sharded_gradient  # noqa: F401 (registers functions for lists)

    return clipped()


def several_with_distribution():
    """As `with_distribution`."""
    import sok_like.distribution.sharded_gradient  # noqa: F401 (registers functions for lists)

    return several()


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


# What changes gradients of a table that two lookups read, and of the kernel.
CHANGES = {
    "by_global_norm": lambda pair: tf.clip_by_global_norm(pair, LIMIT),
    "global_norm": lambda pair: (pair, tf.linalg.global_norm(pair)),
    "by_norm": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT), pair[1]], tf.constant(0.0)),
    "by_norm_of_rows": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT, [1]), pair[1]], 0.0),
    "by_norm_of_columns": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT, [0]), pair[1]], 0.0),
    "by_value": lambda pair: ([tf.clip_by_value(pair[0], -LIMIT, LIMIT), pair[1]], 0.0),
}
SEVERAL = [("group", change) for change in CHANGES] + [("twice", "global_norm")]
SEVERAL += [("gather", "by_global_norm"), ("sparse", "by_norm"), ("outside", "by_global_norm")]
SEVERAL += [("sok2", change) for change in ("by_global_norm", "by_norm", "by_value")]


def several():
    """As `clipped`, of a table that two lookups read, the second one with twice the weight."""
    return {
        f"{door} {change} {mode}": _of_two_lookups(door, CHANGES[change], mode)
        for door, change in SEVERAL
        for mode in MODES
    }


def _of_two_lookups(door, change, mode):
    import sok_like as sok

    variable, look_up = _two_lookups(door, f"{door}_{mode}")
    kernel = tf.Variable(KERNEL)

    def gradients(keys):
        with tf.GradientTape() as tape:
            first, second = look_up(keys)
            loss = tf.reduce_mean(tf.reduce_sum((first + 2 * second) * kernel, -1))
        pair = tape.gradient(loss, [variable, kernel])
        return pair if door == "outside" else change(pair)

    call = tf.function(gradients) if mode == "function" else gradients
    keys = np.ravel(KEYS if sok.size() == 1 else KEYS[sok.rank()])
    result = call(tf.constant(keys, tf.int64))
    (of_rows, of_kernel), norm = change(result) if door == "outside" else result
    rows = {}
    keys = of_rows.indices.numpy()
    if door == "sok2":  # numbers of rows within this rank's part
        keys = keys * sok.size() + sok.rank()
    for key, row in zip(keys.tolist(), of_rows.values.numpy(), strict=True):
        rows[key] = rows.get(key, 0.0) + row
    return rows, of_kernel.numpy(), float(norm)


def _averaged(rows):
    """The rows of a lookup whose gradients are sums over ranks, so that they are means."""
    import sok_like as sok

    share = rows / sok.size()
    return share + tf.stop_gradient(rows - share)


def _two_lookups(door, name):
    """A table, and a function that looks keys up, and the next ones, in two lookups of it."""
    import sok_like as sok
    from sok_like import sok2

    if door == "sok2":
        variable = sok2.Variable(ROWS, name=name)

        def look_up(keys):
            ids = [tf.RaggedTensor.from_uniform_row_length(k, 1) for k in (keys, OTHER(keys))]
            sums = [sok2.lookup_sparse(variable, each, combiners="sum") for each in ids]
            return [_averaged(rows) for rows in sums]

        return variable, look_up
    if door == "group":
        layer = sok.GroupEmbedding(
            {"a": DIM, "b": DIM}, tables={"a": "of_both", "b": "of_both"}, combiners="sum",
            gradient_scale="mean", table_options={"of_both": {"initializer": ramp}}, name=name,
        )  # fmt: skip

        def look_up(keys):
            found = layer({"a": keys[:, None], "b": OTHER(keys)[:, None]}, training=True)
            return found["a"], found["b"]

        return layer.trainable_variables[0], look_up
    layer = sok.All2AllDenseEmbedding(
        None, DIM, 1, 1, dynamic_input=True, gradient_scale="mean", embedding_initializer=ramp,
        name=name,
    )  # fmt: skip
    variable = layer.embedding_variable

    def by_layer(keys):
        return layer(keys, training=True)

    def by_gather(keys):
        return _averaged(tf.gather(variable, keys))

    def by_sparse(keys):
        ids = tf.RaggedTensor.from_uniform_row_length(keys, 1)
        return _averaged(tf.nn.embedding_lookup_sparse(variable, ids, None, "sum"))

    read = {"twice": by_layer, "outside": by_layer, "gather": by_gather, "sparse": by_sparse}[door]
    return variable, lambda keys: (read(keys), read(OTHER(keys)))


# `plain` has a stock tape; `dense` has that, and dense gradients; `scaled` has those and a scaled
# loss; the others have optimizers of this package.
DOORS = ("sok2", "dmp", "plain", "dense", "scaled", "distributed", "legacy", "default")
CLIPPING = [(door, name) for door in DOORS for name in ("clipnorm", "global_clipnorm")]
CLIPPING += [("sok2", "clipvalue"), ("dmp", "clipvalue")]
DENSE = ("dense", "scaled", "legacy")
STRENGTH, SCALE = 0.25, 64.0


def by_optimizers():
    """How far rows move by which a stock optimizer clips a table that two lookups read."""
    return {f"{door} {name}": _moved(door, name) for door, name in CLIPPING if _exists(door)}


def _exists(door):
    return door != "legacy" or not is_keras_3()


def _moved(door, setting):
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    if door == "sok2":
        variable, look_up = _two_lookups(door, setting)
        weights = [variable.as_weight()]
        start = variable.numpy()
        numbers = np.arange(sok.rank(), 6, sok.size())
    else:
        layer = dmp.DistributedEmbedding(
            [tf.keras.layers.Embedding(6, DIM)], input_table_map=[0, 0], row_slice_threshold=1
        )

        def look_up(keys):
            return layer([keys, OTHER(keys)])

        layer.build(None)
        layer.set_weights([ROWS])
        weights = layer.trainable_variables
        variable, start = weights[0], weights[0].numpy()
        numbers = np.array_split(np.arange(6), sok.size())[sok.rank()]
    other = sok.All2AllDenseEmbedding(None, 1, 1, 1, dynamic_input=True, name=f"own_{setting}")
    weights = weights + ([other.embedding_variable] if door == "default" else [])
    optimizer = _clipping(door, other, **{setting: LIMIT})

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            tape = dmp.DistributedGradientTape(tape) if door in ("sok2", "dmp") else tape
            first, second = look_up(keys)
            loss = tf.reduce_mean(tf.reduce_sum((first + 2 * second) * KERNEL, -1))
            loss += tf.reduce_sum(other(keys)) if door == "default" else 0.0
            loss += STRENGTH / 2 * tf.reduce_sum(variable**2) if door in DENSE else 0.0
            loss *= SCALE if door == "scaled" else 1.0
        gradients = tape.gradient(loss, [variable, *weights[1:]])
        if door == "scaled" and not is_keras_3():
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    step(tf.constant(np.ravel(KEYS if sok.size() == 1 else KEYS[sok.rank()]), tf.int64))
    return dict(zip(numbers.tolist(), start - variable.numpy(), strict=True))


def _clipping(door, other, **setting):
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    if door == "legacy":
        return dmp.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(RATE, **setting))
    stock = tf.keras.optimizers.SGD(RATE, **setting)
    if door == "scaled":
        return tf.keras.mixed_precision.LossScaleOptimizer(stock, initial_scale=SCALE)
    if door == "default":
        own = {other.table.table_name: tf.keras.optimizers.SGD(RATE)}
        return sok.OptimizerWrapper(own, default=stock, average_dense_gradients=False)
    return dmp.DistributedOptimizer(stock) if door == "distributed" else stock


def without_norms():
    """Of a table on each rank, or half of its columns: what clips one by one, and all together."""
    return {"whole": _without_norm(2, None), "columns": _without_norm(1, 6 * DIM - 1)}


def _without_norm(count, most):
    from sok_like import dist_model_parallel as dmp

    layer = dmp.DistributedEmbedding(
        [tf.keras.layers.Embedding(6, DIM) for _ in range(count)], column_slice_threshold=most
    )
    layer.build(None)
    layer.set_weights([ROWS] * count)
    variables = layer.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.concat(layer([tf.range(6)] * count), -1) ** 2)
        dense = tf.reduce_sum(variables[0] ** 2)
    gradients = tape.gradient(loss, variables)
    pairs = list(zip(gradients, variables, strict=True))
    by_norm, together = [
        tf.keras.optimizers.SGD(RATE, **{name: LIMIT}) for name in ("clipnorm", "global_clipnorm")
    ]
    found = {
        "rows": raised(lambda: tf.clip_by_norm(gradients[0], LIMIT, axes=[1])),
        "dense": raised(lambda: tf.clip_by_norm(tape.gradient(dense, variables[0]), LIMIT)),
        "clipnorm": raised(lambda: by_norm.apply_gradients(pairs)),
        "norm": float(tf.linalg.global_norm(gradients)),
    }
    starts = [variable.numpy() for variable in variables]
    together.apply_gradients(pairs)
    moved = [s - v.numpy() for s, v in zip(starts, variables, strict=True)]
    return found | {"moved": sum(float((each**2).sum()) for each in moved)}
