"""A layer of columns on 3 ranks against stock columns on dense variables in one process."""

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from tests.checks import parity
from tests.checks.parity import ranks_of

BUCKETS, STEPS, BATCH, RATE = 8, 6, 9, 0.1
# Column: group, dimension, combiner, weighted, whether it has keys of a hash table.
COLUMNS = {
    "a": ("left", 3, "mean", False, True),
    "b": ("left", 3, "sum", True, True),
    "c": ("left", 3, "sqrtn", False, False),
    "d": ("right", 2, "mean", True, True),
    "e": ("right", 3, "sum", False, False),
}


def rows_of(name):
    rng = np.random.default_rng([8, ord(name)])
    return rng.normal(0, 0.3, [BUCKETS, COLUMNS[name][1]]).astype(np.float32)


def batches():
    """Features by name and targets of the whole batch, one per step: ids padded with -1."""
    rng = np.random.default_rng(9)
    for _ in range(STEPS):
        features = {}
        for name in COLUMNS:
            ids = rng.integers(0, BUCKETS, [BATCH, 3])
            ids[np.arange(3) >= rng.integers(0, 4, [BATCH, 1])] = -1
            features[name] = ids
            weights = rng.choice([0.5, 1.0, 2.0], [BATCH, 3]).astype(np.float32)
            features[f"{name}_weight"] = np.where(ids < 0, 0, weights).astype(np.float32)
        yield features, rng.normal(size=[BATCH, 1]).astype(np.float32)


def make_columns(fc, keys, embed):
    """Embedding columns; `keys(name, has_keys)` and `embed(group, ...)` differ for the oracle."""
    made = []
    for name, (group, dimension, combiner, weighted, has_keys) in COLUMNS.items():
        column = keys(name, has_keys)
        if weighted:
            column = fc.weighted_categorical_column(column, f"{name}_weight")
        made.append(embed(group, column, dimension, combiner))
    return made


def identity(name):
    return tf.feature_column.categorical_column_with_identity(name, BUCKETS)


def loss_of(output, targets):
    """Divided by the global batch, so that gradients add up over ranks."""
    return tf.reduce_sum((tf.tanh(output) - targets) ** 2) / BATCH


def train():
    """The outputs of every step, and the rows after the last one."""
    fc = sok.feature_column
    rank, world_size = comm.current().rank, comm.current().world_size

    def keys(name, has_keys):
        if has_keys:
            return fc.categorical_column_with_embedding(name, tf.int64)
        return identity(name)

    def embed(group, *arguments):
        with fc.group_embedding_column_scope(group):
            return fc.embedding_column(*arguments)

    layer = fc.DenseFeatures(make_columns(fc, keys, embed), name="checked")
    dense = {w.name.split("_")[0]: w for w in layer.weights if "checked" not in w.name}
    tables = {name.split("_")[0]: table for name, table in layer.tables.items()}
    for name, variable in dense.items():
        variable.assign(rows_of(name))
    for name, table in tables.items():
        sok.assign(table, np.arange(BUCKETS), rows_of(name))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(RATE))
    variables = layer.trainable_variables
    optimizer.build(variables)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(features, targets):
        with tf.GradientTape() as tape:
            output = layer(features, training=True)
            loss = loss_of(output, targets)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return output

    outputs = []
    for number, (features, targets) in enumerate(batches()):
        mine = ranks_of(number, BATCH, world_size) == rank
        own = {name: tf.constant(value[mine]) for name, value in features.items()}
        outputs.append(step(own, tf.constant(targets[mine])).numpy())
    every = [np.arange(BUCKETS)] * len(tables)
    read = sok.group_embedding_lookup(list(tables.values()), every, training=False)
    rows = {name: found.numpy() for name, found in zip(tables, read, strict=True)}
    return {
        "outputs": outputs,
        "rows": {**rows, **{name: tf.convert_to_tensor(v).numpy() for name, v in dense.items()}},
    }


v1 = tf.compat.v1


def _oracle(world_size):
    """Outputs of every step for the whole batch, and rows at the end."""
    fc = v1.feature_column

    def embed(group, column, dimension, combiner):
        del group
        name = column.name.split("_")[0]
        initializer = v1.constant_initializer(rows_of(name))
        return fc.embedding_column(column, dimension, combiner, initializer)

    columns = make_columns(fc, lambda name, has_keys: identity(name), embed)
    with tf.Graph().as_default(), v1.Session() as session:
        placeholders, held = {}, {}
        for name in COLUMNS:
            placeholders[name] = v1.placeholder(tf.int64, [BATCH, 3])
            placeholders[f"{name}_weight"] = v1.placeholder(tf.float32, [BATCH, 3])
        targets = v1.placeholder(tf.float32, [BATCH, 1])
        output = fc.input_layer(placeholders, columns, cols_to_vars=held)
        tables = {column.name.split("_")[0]: variables[0] for column, variables in held.items()}
        slices = tf.gradients(loss_of(output, targets), list(tables.values()))
        # Those of tf.Variables are averaged over ranks, as all ordinary gradients are.
        scales = [1 if COLUMNS[name][-1] else 1 / world_size for name in tables]
        pairs = [
            (tf.convert_to_tensor(s) * scale, table)
            for s, scale, table in zip(slices, scales, tables.values(), strict=True)
        ]
        train = v1.train.AdagradOptimizer(RATE, 0.1).apply_gradients(pairs)
        session.run(v1.global_variables_initializer())
        outputs = []
        for features, values in batches():
            feed = {placeholders[name]: value for name, value in features.items()}
            found, _ = session.run([output, train], {**feed, targets: values})
            outputs.append(found)
        return outputs, session.run(tables)


def test_training_equals_stock_columns(on_threads):
    world_size = 3
    outputs, rows = _oracle(world_size)
    for rank, result in enumerate(on_threads(world_size, train)):
        for step, (ours, right) in enumerate(zip(result["outputs"], outputs, strict=True)):
            mine = parity.ranks_of(step, BATCH, world_size) == rank
            np.testing.assert_allclose(ours, right[mine], rtol=0, atol=1e-5, err_msg=step)
        assert set(result["rows"]) == set(COLUMNS)
        for name, right in rows.items():
            assert np.abs(right - rows_of(name)).max() > 0.02
            np.testing.assert_allclose(result["rows"][name], right, rtol=0, atol=1e-5, err_msg=name)
