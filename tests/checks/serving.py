"""Models of all front doors: what they compute, for stock TensorFlow to repeat."""

import numpy as np
import tensorflow as tf

import sok_like as sok

BATCH = 12
ITEMS = np.array([-(2**63), -5, 0, 3, 2**40, 2**63 - 1])
COMBINERS = ("sum", "mean", None)
UNSEEN = np.array([7, -9, 2**50 + 1])


def _features():
    """Training features, and others with keys and strings that no table has seen."""
    rng = np.random.default_rng(0)
    names = np.array(["ann", "bob", "", "joe"])
    known = {
        "user": tf.constant(names[rng.integers(0, 4, BATCH)]),
        "item": tf.constant(rng.choice(ITEMS, BATCH)),
        "tags": tf.constant(names[rng.integers(0, 4, [BATCH, 3])]),
    }
    more = np.append(names, "new")
    both = {
        "user": tf.constant(more[rng.integers(0, 5, BATCH)]),
        "item": tf.constant(rng.choice(np.r_[ITEMS, UNSEEN], BATCH)),
        "tags": tf.constant(more[rng.integers(0, 5, [BATCH, 3])]),
    }
    return known, both, rng.normal(size=[BATCH, 1]).astype(np.float32)


def _keras_inputs():
    return {
        "user": tf.keras.Input([], dtype="string", name="user"),
        "item": tf.keras.Input([], dtype="int64", name="item"),
        "tags": tf.keras.Input([3], dtype="string", name="tags"),
    }


def _trained(model):
    known, both, labels = _features()
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse", run_eagerly=True)
    model.fit(known, labels, batch_size=4, epochs=2, verbose=0)
    return model, both, None, lambda inputs: model.predict(inputs, verbose=0)


def group():
    """sok.GroupEmbedding: strings, integers, lists that are filled up."""
    inputs = _keras_inputs()
    rows = sok.GroupEmbedding(
        {"user": 5, "item": 4, "tags": 3},
        combiners={"tags": "sqrtn"},
        pad_key="",
        table_options={
            "user": {"initializer": tf.keras.initializers.TruncatedNormal(0.0, 0.5)},
            "tags": {"initializer": tf.keras.initializers.RandomNormal(0.0, 0.5)},
        },
        name="served_group",
    )(inputs)
    both = tf.keras.layers.Concatenate()([rows["user"], rows["item"], rows["tags"]])
    return _trained(tf.keras.Model(inputs, tf.keras.layers.Dense(2)(both)))


def columns():
    """Feature columns of DeepRec's kind, as a layer."""
    keys = [
        sok.feature_column.categorical_column_with_embedding("user"),
        sok.feature_column.categorical_column_with_embedding("tags"),
    ]
    with sok.feature_column.group_embedding_column_scope(name="served"):
        made = [sok.feature_column.embedding_column(key, dimension=4) for key in keys]
    inputs = _keras_inputs()
    rows = sok.feature_column.DenseFeatures(made, name="served_columns")(inputs)
    return _trained(tf.keras.Model(inputs, tf.keras.layers.Dense(1)(rows)))


class Sok1(tf.keras.Model):
    """SOK's two layers, padded with -1, in a subclassed model with a tf.function inside."""

    def __init__(self):
        super().__init__(name="served_sok1")
        self.fields = sok.DistributedEmbedding(
            "mean", None, 4, slot_num=2, max_nnz=3, pad_key=-1, name="served_fields"
        )
        self.flat = sok.All2AllDenseEmbedding(None, 4, 2, 3, name="served_flat")
        self.top = tf.keras.layers.Dense(1)

    @tf.function
    def vectors(self, keys, training):
        rows = tf.reduce_sum(self.flat(keys, training=training), 2)
        return tf.reshape(self.fields(keys, training=training) + rows, [-1, 8])

    def call(self, keys, training=True):
        return self.top(self.vectors(keys, training))


def sok1():
    rng = np.random.default_rng(1)
    model = Sok1()
    model(tf.constant(rng.choice(np.r_[ITEMS, -1], [BATCH, 2, 3])), training=True)
    keys = rng.choice(np.r_[ITEMS, UNSEEN, -1], [BATCH, 2, 3])
    specs = tf.TensorSpec([None, 2, 3], tf.int64, "keys")
    return model, {"keys": keys}, specs, lambda inputs: model.predict(inputs["keys"], verbose=0)


class Sharded(tf.keras.Model):
    """DMP: tables sliced by columns and by rows, replicated, and hashed."""

    def __init__(self):
        super().__init__(name="served_sharded")
        sizes = [(40, 8), (6, 4), (30, 4)]
        tables = [
            sok.Embedding(*size, combiner=c) for size, c in zip(sizes, COMBINERS, strict=True)
        ]
        tables.append(sok.HashEmbedding(4, combiner="mean", name="served_hashed"))
        self.tables = sok.dist_model_parallel.DistributedEmbedding(
            tables,
            column_slice_threshold=200,
            row_slice_threshold=320,
            data_parallel_threshold=24,
            name="served_dmp",
        )
        self.top = tf.keras.layers.Dense(1)

    def call(self, inputs, training=False):
        rows = self.tables([inputs[name] for name in sorted(inputs)], training=training)
        rows[2] = tf.reduce_sum(rows[2], 1)
        return self.top(tf.concat(rows, 1))


def sharded():
    rng = np.random.default_rng(2)
    model = Sharded()
    inputs = {n: rng.integers(0, m, [BATCH, 3]) for n, m in (("a", 40), ("b", 6), ("c", 30))}
    inputs = {name: tf.constant(value) for name, value in inputs.items()}
    model({**inputs, "d": tf.constant(rng.choice(ITEMS, [BATCH, 3]))}, training=True)
    inputs["d"] = tf.constant(rng.choice(np.r_[ITEMS, UNSEEN], [BATCH, 3]))
    return model, inputs, inputs, lambda inputs: model.predict(inputs, verbose=0)


def model_parallel(layouts, shape=None):
    """`ModelParallel` with layouts by path, on a mesh of all ranks; by default a row of them."""
    distribution = sok.distribution
    devices = distribution.list_devices()
    mesh = distribution.DeviceMesh(shape or (1, len(devices)), ("batch", "model"), devices)
    by_path = distribution.LayoutMap(mesh)
    for path, layout in layouts.items():
        by_path[path] = layout
    return distribution.ModelParallel(mesh, by_path)


def parallel():
    """Keras' ModelParallel: a table by rows, a kernel by columns."""
    layouts = {"served_items/embeddings": ("model", None), "served_dense.*kernel": (None, "model")}
    with model_parallel(layouts).scope():
        items = tf.keras.Input([3], dtype="int64", name="items")
        rows = tf.keras.layers.Embedding(50, 8, name="served_items")(items)
        hidden = tf.keras.layers.Dense(6, "relu", name="served_dense")
        model = tf.keras.Model(items, hidden(tf.keras.layers.Flatten()(rows)))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        ids = np.random.default_rng(0).integers(0, 50, [BATCH, 3])
        model.fit(ids, np.ones([BATCH, 6]), batch_size=4, verbose=0)
    return model, {"items": ids}, None, lambda inputs: model.predict(inputs["items"], verbose=0)


class OneTable(tf.Module):
    """The rows of a table's keys."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
    def __call__(self, keys):
        return {"rows": tf.nn.embedding_lookup(self.table, keys)}


class Module(tf.Module):
    """TensorFlow's own lookups of a table, weighted, beside a string lookup of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.table = sok.EmbeddingVariable(4, name="served_module")
        self.lookup = sok.group_embedding_lookup_sparse
        pairs = tf.lookup.KeyValueTensorInitializer(["ann", "bob"], tf.constant([3, 5], tf.int64))
        self.names = tf.lookup.StaticHashTable(pairs, -5)
        self.bias = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @tf.function(
        input_signature=[
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.float32),
            tf.TensorSpec([None], tf.string),
        ]
    )
    def __call__(self, keys, weights, names):
        (rows,) = self.lookup([self.table], [keys], ["sqrtn"], sp_weights=[weights], training=False)
        safe = tf.nn.safe_embedding_lookup_sparse(self.table, keys.to_sparse(), default_id=3)
        named = tf.nn.embedding_lookup(self.table, self.names.lookup(names))
        return rows + self.bias + safe + named


def module():
    rng = np.random.default_rng(4)
    made = Module()
    sok.assign(made.table, ITEMS, rng.normal(size=[len(ITEMS), 4]).astype(np.float32))
    splits = np.sort(np.r_[0, rng.integers(0, 20, BATCH - 1), 20])
    keys = tf.RaggedTensor.from_row_splits(rng.choice(np.r_[ITEMS, UNSEEN], 20), splits)
    inputs = {
        "keys": keys,
        "weights": keys.with_values(tf.constant(rng.uniform(0, 2, 20), tf.float32)),
        "names": tf.constant(np.array(["ann", "bob", "who"])[rng.integers(0, 3, BATCH)]),
    }
    return made, inputs, None, lambda inputs: made(*inputs.values())
