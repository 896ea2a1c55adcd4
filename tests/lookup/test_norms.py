"""Clipping by hand on several ranks is that of one process on a dense variable."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like import sok2
from sok_like.runtime.framework.running_keras import is_keras_3

DIM, LIMIT, RATE = 3, 0.05, 1.0
KEYS = [[1, 2, 2, 5], [2, 4, 1, 1]]  # of each rank; one process has both
OTHER = lambda keys: (keys + 1) % 6  # noqa: E731
KERNEL = np.array([0.5, -1.0, 2.0], np.float32)


def ramp(shape, dtype=None):
    """The row of each key is another one."""
    return (np.arange(np.prod(shape)).reshape(shape) / 10).astype(np.float32)


ROWS = ramp((6, DIM))


def keys_here():
    keys = KEYS if sok.size() == 1 else KEYS[sok.rank()]
    return tf.constant(np.ravel(keys), tf.int64)


# What changes gradients of a table that two lookups read, and of the kernel.
CHANGES = {
    "by_global_norm": lambda pair: tf.clip_by_global_norm(pair, LIMIT),
    "global_norm": lambda pair: (pair, tf.linalg.global_norm(pair)),
    "by_norm": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT), pair[1]], tf.constant(0.0)),
    "by_norm_of_rows": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT, [1]), pair[1]], 0.0),
    "by_norm_of_columns": lambda pair: ([tf.clip_by_norm(pair[0], LIMIT, [0]), pair[1]], 0.0),
    "by_value": lambda pair: ([tf.clip_by_value(pair[0], -LIMIT, LIMIT), pair[1]], 0.0),
}
# Doors, how gradients are computed, and what changes them, each by itself.
SEVERAL = [
    ("group", "eager", [change for change in CHANGES if change != "by_value"]),
    ("group", "function", ["by_global_norm", "by_norm", "by_value"]),
    ("twice", "eager", ["global_norm"]),
    ("twice_by_dmp", "function", ["by_global_norm"]),
    ("gather", "function", ["by_global_norm"]),
    ("sparse", "function", ["by_norm"]),
    ("outside", "function", ["by_global_norm", "by_norm"]),
    ("sok2", "function", ["by_global_norm", "by_norm", "by_value"]),
    ("sok2_home", "eager", ["by_global_norm", "by_norm"]),
]


def of_table_of_two_lookups(door, mode, names, with_distribution):
    """Changed gradients of a table that two lookups read, the second one with twice the weight."""
    if with_distribution:  # whose gradients have norms of their own
        import sok_like.distribution.sharded_gradient  # noqa: F401 (registers functions for lists)
    variable, look_up = _two_lookups(door, f"{door}_{mode}")
    kernel = tf.Variable(KERNEL)

    def gradients(keys):
        with tf.GradientTape() as tape:
            tape = dmp.DistributedGradientTape(tape) if door == "twice_by_dmp" else tape
            first, second = look_up(keys)
            loss = tf.reduce_mean(tf.reduce_sum((first + 2 * second) * kernel, -1))
        pair = tape.gradient(loss, [variable, kernel])
        return pair if door == "outside" else changed(pair)

    def changed(pair):
        return [CHANGES[name](pair) for name in names]

    result = (tf.function(gradients) if mode == "function" else gradients)(keys_here())
    found = {}
    for name, change in zip(names, changed(result) if door == "outside" else result, strict=True):
        (of_rows, of_kernel), norm = change
        numbers = of_rows.indices.numpy()
        if door.startswith("sok2"):  # of rows within this rank's part
            numbers = variable._rows_here()[numbers]
        rows = {}
        for key, row in zip(numbers.tolist(), of_rows.values.numpy(), strict=True):
            rows[key] = rows.get(key, 0.0) + row
        found[name] = rows, of_kernel.numpy(), float(norm)
    return found


def _averaged(rows):
    """The rows of a lookup whose gradients are sums over ranks, so that they are means."""
    share = rows / sok.size()
    return share + tf.stop_gradient(rows - share)


def _two_lookups(door, name):
    """A table, and a function that looks keys up, and the next ones, in two lookups of it."""
    if door.startswith("sok2"):
        home = f"localized:{sok.size() - 1}" if door == "sok2_home" else None
        variable = sok2.Variable(ROWS, name=name, mode=home)

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

    read = {"gather": by_gather, "sparse": by_sparse}.get(door, by_layer)
    return variable, lambda keys: (read(keys), read(OTHER(keys)))


# `plain` has a stock tape; `dense` has that, and dense gradients; `scaled` has those and a scaled
# loss; the others have optimizers of this package.
CLIPPING = [
    (door, name)
    for door in ("sok2", "dmp", "legacy")
    for name in ("clipnorm", "global_clipnorm", "clipvalue")
    if (door, name) != ("legacy", "clipvalue")
]
CLIPPING += [("plain", "clipnorm"), ("dense", "global_clipnorm"), ("scaled", "clipnorm")]
CLIPPING += [("distributed", "global_clipnorm"), ("default", "clipnorm")]
DENSE = ("dense", "scaled", "legacy")
STRENGTH, SCALE = 0.25, 64.0


def moved_by_optimizer(door, setting):
    """How far rows move by which a stock optimizer clips a table that two lookups read."""
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

    # Gradients are marked in functions as they are eagerly.
    in_function = setting == "clipnorm" or door == "dmp"
    (tf.function(step) if in_function else step)(keys_here())
    return dict(zip(numbers.tolist(), start - variable.numpy(), strict=True))


def _clipping(door, other, **setting):
    if door == "legacy":
        return dmp.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(RATE, **setting))
    stock = tf.keras.optimizers.SGD(RATE, **setting)
    if door == "scaled":
        return tf.keras.mixed_precision.LossScaleOptimizer(stock, initial_scale=SCALE)
    if door == "default":
        own = {other.table.table_name: tf.keras.optimizers.SGD(RATE)}
        return sok.OptimizerWrapper(own, default=stock, average_dense_gradients=False)
    return dmp.DistributedOptimizer(stock) if door == "distributed" else stock


def without_norms(count, most):
    """A table on each rank, or half of its columns; how far this rank moves by a joint norm."""
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

    @tf.function
    def in_function():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.concat(layer([tf.range(6)] * count), -1) ** 2)
        return tape.gradient(loss, variables)

    by_norm, together = [
        tf.keras.optimizers.SGD(RATE, **{name: LIMIT}) for name in ("clipnorm", "global_clipnorm")
    ]
    for call in (
        lambda: tf.clip_by_norm(gradients[0], LIMIT, axes=[1]),
        lambda: tf.clip_by_norm(tape.gradient(dense, variables[0]), LIMIT),
        lambda: tf.clip_by_norm(in_function()[0], LIMIT),
        lambda: by_norm.apply_gradients(zip(gradients, variables, strict=True)),
    ):
        with pytest.raises(ValueError, match="row_slice_threshold"):
            call()
    norm = tf.linalg.global_norm(gradients)
    np.testing.assert_allclose(norm, np.sqrt(count) * norm_of(2 * ROWS), rtol=1e-5)
    starts = [variable.numpy() for variable in variables]
    together.apply_gradients(zip(gradients, variables, strict=True))
    return norm_of(*(start - v.numpy() for start, v in zip(starts, variables, strict=True)))


def norm_of(*gradients):
    return np.sqrt(sum((gradient**2).sum() for gradient in gradients))


def of_two_lookups():
    """Of a mean over all samples: of the rows by key, of both lookups, and of the kernel."""
    keys = np.array(KEYS).ravel()
    counts = np.zeros(6)
    np.add.at(counts, keys, 1)
    np.add.at(counts, OTHER(keys), 2)
    of_rows = counts[:, None] * KERNEL / len(keys)
    used = np.flatnonzero(counts)
    of_kernel = (ROWS[keys] + 2 * ROWS[OTHER(keys)]).mean(0)
    return {key: of_rows[key] for key in used.tolist()}, of_kernel


@pytest.mark.parametrize(
    "world_size, door, mode, names, with_distribution",
    [
        (1, "group", "function", ["by_global_norm"], False),
        (1, "sok2", "eager", ["by_norm"], False),
        *((2, *case, False) for case in SEVERAL),
        (2, "group", "function", ["by_global_norm"], True),
        (2, "sok2", "eager", ["by_norm"], True),
        (2, "gather", "eager", ["by_value"], True),
    ],
)
def test_a_table_that_two_lookups_read(
    on_threads, world_size, door, mode, names, with_distribution
):
    call = of_table_of_two_lookups, door, mode, names, with_distribution
    results = on_threads(world_size, *call)
    for name in names:
        check_changed([result[name] for result in results], name)


def check_changed(results, change):
    of_rows, of_kernel = of_two_lookups()
    pair = [tf.constant(dense, tf.float32) for dense in ([*of_rows.values()], of_kernel)]
    (right, kernel), right_norm = CHANGES[change](pair)  # by stock TensorFlow, as they are dense
    assert change == "global_norm" or not np.allclose(right, pair[0])
    seen = {}
    for rows, _, norm in results:
        for key, row in rows.items():
            seen[key] = seen.get(key, 0.0) + row
        np.testing.assert_allclose(norm, right_norm, rtol=1e-5)
    assert sorted(seen) == sorted(of_rows)
    for key, row in zip(of_rows, right, strict=True):
        np.testing.assert_allclose(seen[key], row, rtol=1e-5)
    np.testing.assert_allclose(np.mean([mine for _, mine, _ in results], 0), kernel, rtol=1e-5)


@pytest.mark.keras
@pytest.mark.parametrize(
    "world_size, door, setting",
    [(1, "sok2", "clipnorm"), (1, "dmp", "global_clipnorm"), *((2, *case) for case in CLIPPING)],
)
def test_stock_optimizers_clip_the_gradient_of_the_whole_table(
    on_threads, world_size, door, setting
):
    if door == "legacy" and is_keras_3():
        pytest.skip("an optimizer of tf_keras")
    moved = on_threads(world_size, moved_by_optimizer, door, setting)
    of_rows, _ = of_two_lookups()
    if door in DENSE:
        of_rows = {key: of_rows.get(key, 0.0) + STRENGTH * ROWS[key] for key in range(6)}
    factor = LIMIT / norm_of(*of_rows.values())  # the only variable
    right = {key: row * factor for key, row in of_rows.items()}
    if setting == "clipvalue":
        right = {key: np.clip(row, -LIMIT, LIMIT) for key, row in of_rows.items()}
    seen = {key: row for of_rank in moved for key, row in of_rank.items()}
    assert sorted(seen) == list(range(6))
    for key, row in seen.items():
        np.testing.assert_allclose(row, right.get(key, 0.0), rtol=1e-4, atol=1e-6)


@pytest.mark.keras
@pytest.mark.parametrize("count, most", [(2, None), (1, 6 * DIM - 1)])
def test_a_part_that_is_not_rows_of_one_table_has_no_norm_of_its_own(on_threads, count, most):
    moved = on_threads(2, without_norms, count, most)
    np.testing.assert_allclose(norm_of(*moved), LIMIT, rtol=1e-4)
