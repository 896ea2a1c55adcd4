"""Clipping by hand on several ranks is that of one process on a dense variable."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like import sok2
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.thread_ranks import raised

DIM, LIMIT, RATE = 3, 0.05, 1.0
KEYS = [[1, 2, 2, 5], [2, 4, 1, 1]]  # of each rank; one process has both
OTHER = lambda keys: (keys + 1) % 6  # noqa: E731
KERNEL = np.array([0.5, -1.0, 2.0], np.float32)
MODES = ("eager", "function")


def ramp(shape, dtype=None):
    """The row of each key is another one."""
    return (np.arange(np.prod(shape)).reshape(shape) / 10).astype(np.float32)


ROWS = ramp((6, DIM))


def clipped(name, mode):
    """Clipped gradients of this rank's keys and of the kernel, and the norm."""
    layer = sok.All2AllDenseEmbedding(
        None, DIM, 1, 1, dynamic_input=True, gradient_scale="mean",
        embedding_initializer=ramp, name=f"{name}_{mode}",
    )  # fmt: skip
    kernel = tf.Variable(KERNEL)
    keys = np.array(KEYS) if sok.size() == 1 else np.array(KEYS[sok.rank()])
    variables = [layer.embedding_variable, kernel]

    def gradients(keys):
        with tf.GradientTape() as tape:
            tape = dmp.DistributedGradientTape(tape) if name == "tape_of_dmp" else tape
            loss = tf.reduce_mean(tf.reduce_sum(layer(keys, training=True) * kernel, -1))
        return tf.clip_by_global_norm(tape.gradient(loss, variables), LIMIT)

    call = tf.function(gradients) if mode == "function" else gradients
    (of_rows, of_kernel), norm = call(tf.constant(keys.ravel(), tf.int64))
    rows = dict(zip(of_rows.indices.numpy().tolist(), of_rows.values.numpy(), strict=True))
    return rows, of_kernel.numpy(), float(norm)


def tables():
    """Norm of the gradients of two dense tables, on 2 ranks one on each, by the modes."""
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


def of_table_of_two_lookups(door, change, mode):
    """As `clipped`, of a table that two lookups read, the second one with twice the weight."""
    change = CHANGES[change]
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
    share = rows / sok.size()
    return share + tf.stop_gradient(rows - share)


def _two_lookups(door, name):
    """A table, and a function that looks keys up, and the next ones, in two lookups of it."""
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

    pairs = list(zip(gradients, variables, strict=True))
    by_norm, together = [
        tf.keras.optimizers.SGD(RATE, **{name: LIMIT}) for name in ("clipnorm", "global_clipnorm")
    ]
    found = {
        "rows": raised(lambda: tf.clip_by_norm(gradients[0], LIMIT, axes=[1])),
        "dense": raised(lambda: tf.clip_by_norm(tape.gradient(dense, variables[0]), LIMIT)),
        "behind": raised(lambda: tf.clip_by_norm(in_function()[0], LIMIT)),
        "clipnorm": raised(lambda: by_norm.apply_gradients(pairs)),
        "norm": float(tf.linalg.global_norm(gradients)),
    }
    starts = [variable.numpy() for variable in variables]
    together.apply_gradients(pairs)
    moved = [s - v.numpy() for s, v in zip(starts, variables, strict=True)]
    return found | {"moved": sum(float((each**2).sum()) for each in moved)}


each_world = pytest.mark.parametrize("world_size", [1, 2])
each_mode = pytest.mark.parametrize("mode", MODES)


def whole_gradients():
    """Of a mean over all samples: of the rows by key, and of the kernel."""
    keys = np.array(KEYS).ravel()
    of_rows = {key: KERNEL * (keys == key).mean() for key in np.unique(keys).tolist()}
    return of_rows, ROWS[keys].mean(0)


def norm_of(*gradients):
    return np.sqrt(sum((gradient**2).sum() for gradient in gradients))


def check(results, row_factor, kernel_factor, norm):
    """Each key's row is on one rank; the kernel's gradients of all ranks have this mean."""
    of_rows, of_kernel = whole_gradients()
    seen = [(key, row) for rows, _, _ in results for key, row in rows.items()]
    assert sorted(key for key, _ in seen) == sorted(of_rows)
    for key, row in seen:
        np.testing.assert_allclose(row, of_rows[key] * row_factor, rtol=1e-5)
    kernel = np.mean([kernel for _, kernel, _ in results], 0)
    np.testing.assert_allclose(kernel, of_kernel * kernel_factor, rtol=1e-5)
    np.testing.assert_allclose([found for _, _, found in results], norm, rtol=1e-5)


def global_norm():
    of_rows, of_kernel = whole_gradients()
    norm = norm_of(*of_rows.values(), of_kernel)
    assert norm > LIMIT
    return norm


@each_world
@each_mode
@pytest.mark.parametrize("name", ["by_global_norm", "tape_of_dmp"])
def test_clip_by_global_norm(on_threads, world_size, name, mode):
    factor = LIMIT / global_norm()
    check(on_threads(world_size, clipped, name, mode), factor, factor, global_norm())


@each_world
def test_global_norm_of_dense_tables(on_threads, world_size):
    keys = np.array(KEYS).ravel()
    of_rows = [2 * ROWS[key] * (keys == key).mean() for key in np.unique(keys)]
    right = norm_of(*of_rows) * np.sqrt(2)  # both tables begin with the same rows
    for found in on_threads(world_size, tables):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def of_two_lookups():
    """As `whole_gradients`, of a table that two lookups read: their parts are summed by key."""
    keys = np.array(KEYS).ravel()
    counts = np.zeros(6)
    np.add.at(counts, keys, 1)
    np.add.at(counts, OTHER(keys), 2)
    of_rows = counts[:, None] * KERNEL / len(keys)
    used = np.flatnonzero(counts)
    of_kernel = (ROWS[keys] + 2 * ROWS[OTHER(keys)]).mean(0)
    return {key: of_rows[key] for key in used.tolist()}, of_kernel


def clipped_to(rows, axis):
    """Stock TensorFlow's `clip_by_norm` of the dense gradient."""
    return tf.clip_by_norm(tf.constant(rows, tf.float32), LIMIT, axis).numpy()


@pytest.mark.parametrize("with_distribution", [False, True])
@each_world
@each_mode
@pytest.mark.parametrize(("door", "change"), SEVERAL)
def test_a_table_that_two_lookups_read(
    on_threads, with_distribution, world_size, door, change, mode
):
    if with_distribution:  # whose gradients have norms of their own
        import sok_like.distribution.sharded_gradient  # noqa: F401 (registers functions for lists)
    results = on_threads(world_size, of_table_of_two_lookups, door, change, mode)
    of_rows, of_kernel = of_two_lookups()
    whole = norm_of(*of_rows.values(), of_kernel)
    dense = np.array(list(of_rows.values()))
    right = {
        "by_norm": lambda: clipped_to(dense, None),
        "by_norm_of_rows": lambda: clipped_to(dense, 1),
        "by_norm_of_columns": lambda: clipped_to(dense, 0),
        "by_value": lambda: np.clip(dense, -LIMIT, LIMIT),
        "by_global_norm": lambda: dense * LIMIT / whole,
        "global_norm": lambda: dense,
    }[change]()
    assert change == "global_norm" or not np.allclose(right, dense)
    factor = LIMIT / whole if change == "by_global_norm" else 1.0
    seen = {}
    for rows, _, norm in results:
        for key, row in rows.items():
            seen[key] = seen.get(key, 0.0) + row
        np.testing.assert_allclose(norm, whole if "global" in change else 0.0, rtol=1e-5)
    assert sorted(seen) == sorted(of_rows)
    for key, row in zip(of_rows, right, strict=True):
        np.testing.assert_allclose(seen[key], row, rtol=1e-5)
    kernel = np.mean([kernel for _, kernel, _ in results], 0)
    np.testing.assert_allclose(kernel, of_kernel * factor, rtol=1e-5)


@pytest.mark.keras
@each_world
@pytest.mark.parametrize(("door", "setting"), CLIPPING)
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
def test_a_part_that_is_not_rows_of_one_table_has_no_norm_of_its_own(on_threads):
    results = on_threads(2, without_norms)
    for kind, count in (("whole", 2), ("columns", 1)):
        found = [result[kind] for result in results]
        for each in found:
            for clip in ("rows", "dense", "behind", "clipnorm"):
                error, message = each[clip]
                assert error == "ValueError" and "row_slice_threshold" in message, (kind, clip)
            np.testing.assert_allclose(each["norm"], np.sqrt(count) * norm_of(2 * ROWS), rtol=1e-5)
        moved = np.sqrt(sum(each["moved"] for each in found))
        np.testing.assert_allclose(moved, LIMIT, rtol=1e-4)
