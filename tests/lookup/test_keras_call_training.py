"""Models whose `call` has no `training`: `fit` inserts keys, `evaluate` and `predict` do not."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

KEYS = np.arange(6, dtype=np.int64).reshape(3, 2)
TARGETS = np.ones([3, 1], np.float32)


def layers(sok):
    """Layers over one table, and functions `[batch, 2] -> [batch, ...]` that call them."""
    fields = sok.DistributedEmbedding("sum", None, 2, 2, 1, name="fields")
    flat = sok.All2AllDenseEmbedding(None, 2, 2, 1, name="flat")
    group = sok.GroupEmbedding([2], name="group")
    hashed = sok.HashEmbedding(2, name="hashed")
    listed = sok.HashEmbedding(2, name="listed")
    dmp = sok.dist_model_parallel.DistributedEmbedding([listed])
    key = sok.feature_column.categorical_column_with_embedding("key", dtype=tf.int64)
    columns = sok.feature_column.DenseFeatures([sok.feature_column.embedding_column(key, 2)])
    table = sok.EmbeddingVariable(2, name="by_key").as_weight()
    return {
        "fields": (fields, fields),
        "flat": (flat, flat),
        "group": (group, lambda keys: group([keys])[0]),
        "hashed": (hashed, hashed),
        "dmp": (dmp, lambda keys: dmp([keys])[0]),
        "columns": (columns, lambda keys: columns({"key": keys})),
        "by key": (table, lambda keys: tf.gather(table, keys)),
        "function": (table, lambda keys: sok.group_embedding_lookup([table], [keys])[0]),
    }


class Model(tf.keras.Model):
    def __init__(self, holder, rows):
        super().__init__()
        self.holder, self.rows = holder, rows
        self.flatten = tf.keras.layers.Flatten()
        self.dropout = tf.keras.layers.Dropout(0.5)
        self.normalize = tf.keras.layers.BatchNormalization()
        self.dense = tf.keras.layers.Dense(1)

    def call(self, keys):
        rows = self.flatten(self.rows(tf.cast(keys, tf.int64)))
        return self.dense(self.normalize(self.dropout(rows)))

    def count(self):
        return sum(int(w.size()) for w in self.weights if hasattr(w, "table_name"))


class OwnSteps(Model):
    def test_step(self, data):
        return {"loss": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data)


@pytest.mark.parametrize(
    "cls, kind",
    [
        *[(Model, kind) for kind in ("fields", "flat", "group", "hashed", "dmp", "columns")],
        (Model, "by key"),
        (Model, "function"),
        (OwnSteps, "fields"),
        (OwnSteps, "by key"),
    ],
)
def test_only_fit_inserts_keys(sok, cls, kind):
    model = cls(*layers(sok)[kind])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=kind != "fields", jit_compile=False)
    first = model.predict(KEYS, verbose=0)
    # A flag of the table's layer must not reach the layers behind it.
    np.testing.assert_array_equal(model.predict_on_batch(KEYS), first)
    model.evaluate(KEYS, TARGETS, verbose=0)
    model.test_on_batch(KEYS, TARGETS)
    assert model.count() == 0
    assert not model.normalize.moving_mean.numpy().any()
    model.fit(KEYS[:1], TARGETS[:1], validation_data=(KEYS, TARGETS), verbose=0)
    assert model.count() == 2


def test_a_given_flag_counts(sok):
    _, look_up = layers(sok)["fields"]
    model = Model(look_up, lambda keys: look_up(keys[:, ::-1], training=True))
    model.compile(loss="mse", run_eagerly=True)
    model.predict(KEYS + 100, verbose=0)
    assert model.count() == KEYS.size
