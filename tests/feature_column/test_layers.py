"""`DenseFeatures` and `SequenceFeatures`: eagerly, in Keras models of both kinds, on ranks."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.feature_column import columns
from tests.feature_column import cases
from tests.training import train_step

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
IDS = np.arange(cases.BUCKETS)


@pytest.fixture
def fc(sok):
    return sok.feature_column


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_equals_stock_input_layer(sok, fc, kind):
    layer = cases.filled(fc.DenseFeatures(cases.group_columns(fc), name="both"))
    assert set(layer.tables) == set(cases.DIMS) - {"hashed_embedding"}
    assert len(layer.trainable_variables) == len(cases.DIMS)
    features = cases.tensors(kind)
    right = cases.expected()[0]
    in_graph = tf.function(lambda: layer(features, training=True))
    for found in (layer(features), in_graph()):
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    operations = in_graph.get_concrete_function().graph.get_operations()
    assert sum(op.type == "SokLookup" for op in operations) == len(cases.GROUPS) + 1


def test_survives_its_config(sok, fc):
    layer = cases.filled(fc.DenseFeatures(cases.group_columns(fc), gradient_scale="mean"))
    again = cases.filled(fc.DenseFeatures.from_config(layer.get_config()))
    assert again.gradient_scale == "mean" and again.name == layer.name
    features = cases.tensors("ragged")
    np.testing.assert_array_equal(again(features), layer(features))
    groups, before = (
        [c.group for c in one._columns.every if columns.is_fused(c)] for one in (again, layer)
    )
    assert groups == before and set(groups) == {*cases.GROUPS, None}


# ---- in Keras models ----

WORDS = np.array([["red", "big"], ["blue", ""], ["green", "big"], ["red", ""]])
NUMBERS = np.array([[1], [2**40], [-7], [1]])
PRICES = np.array([0.5, 1.0, -1.0, 0.0], np.float32)
FEATURES = {"word": WORDS, "number": NUMBERS, "price": PRICES}
LABELS = np.array([[1.0], [0.0], [2.0], [-1.0]], np.float32)


def small_columns(fc):
    with fc.group_embedding_column_scope("all"):
        return [
            fc.embedding_column(fc.categorical_column_with_embedding("word"), 3, "sum"),
            fc.embedding_column(fc.categorical_column_with_embedding("number", tf.int64), 2),
            tf.feature_column.numeric_column("price"),
        ]


def subclassed(fc):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.columns = fc.DenseFeatures(small_columns(fc), name="inputs")
            self.head = tf.keras.layers.Dense(1)

        def call(self, features, training=False):
            return self.head(self.columns(features, training=training))

    return Model()


def functional(fc):
    inputs = {
        "word": tf.keras.Input([2], dtype="string", name="word"),
        "number": tf.keras.Input([1], dtype="int64", name="number"),
        "price": tf.keras.Input([], name="price"),
    }
    outputs = fc.DenseFeatures(small_columns(fc), name="inputs")(inputs)
    assert tuple(outputs.shape) == (None, 6)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(outputs))


def table_sizes(model):
    (layer,) = (layer for layer in model.layers if layer.name == "inputs")
    return {name: int(table.size()) for name, table in layer.tables.items()}


@pytest.mark.parametrize("make", [subclassed, functional])
def test_fit_and_predict(sok, fc, tmp_path, make):
    tf.keras.utils.set_random_seed(1)
    data = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(4)
    model = make(fc)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse")
    model.predict(data, verbose=0)
    sizes = {"word_embedding": 4, "number_embedding": 3}
    assert table_sizes(model) == dict.fromkeys(sizes, 0)
    losses = model.fit(data.repeat(40), verbose=0, epochs=2).history["loss"]
    assert losses[1] < 0.1 * losses[0]
    assert table_sizes(model) == sizes
    file = str(tmp_path / "model.weights.h5")
    model.save_weights(file)
    right = model.predict(data, verbose=0)
    other = make(fc)
    other.predict(data, verbose=0)  # builds a subclassed model
    other.load_weights(file)
    assert table_sizes(other) == sizes
    np.testing.assert_allclose(other.predict(data, verbose=0), right, rtol=0, atol=1e-6)


def test_checkpoint(sok, fc, tmp_path):
    first, second = (cases.filled(fc.DenseFeatures(cases.group_columns(fc))) for _ in range(2))
    for table in second.tables.values():
        table.clear()
    cases.dense_weight(second).assign(tf.zeros([cases.BUCKETS, 2]))
    path = tf.train.Checkpoint(layer=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(layer=second).read(path).assert_consumed()
    features = cases.tensors("ragged")
    np.testing.assert_array_equal(second(features, training=False), first(features))


def test_frozen_and_of_another_dtype(sok, fc):
    keys = fc.categorical_column_with_embedding("number", tf.int64)
    layer = fc.DenseFeatures([fc.embedding_column(keys, 2, trainable=False)])
    assert layer.trainable_variables == [] and len(layer.weights) == 1
    assert fc.DenseFeatures([fc.embedding_column(keys, 2)], trainable=False).trainable_weights == []
    layer = fc.DenseFeatures(small_columns(fc), dtype="mixed_bfloat16")
    assert layer(FEATURES).dtype == tf.bfloat16


def test_sequences(sok, fc):
    ids = tf.ragged.constant([[3, 1], [], [2, 2, 2]], dtype=tf.int64)
    with fc.group_embedding_column_scope("s"):
        column = fc.embedding_column(
            fc.sequence_categorical_column_with_embedding("a", tf.int64), 2
        )
    layer = fc.SequenceFeatures([column])
    rows = cases.rows_of("a", 2)
    sok.assign(layer.tables["a_embedding"], IDS, rows)
    for features in (ids, ids.to_sparse(), ids.to_tensor(-1)):
        found, lengths = layer({"a": features})
        np.testing.assert_array_equal(found, tf.gather(rows, ids).to_tensor())
        assert lengths.numpy().tolist() == [2, 0, 3]
    symbolic = layer({"a": tf.keras.Input([None], dtype="int64")})
    assert [tuple(x.shape) for x in symbolic] == [(None, None, 2), (None,)]


def shared(fc, in_group=False, **options):
    """Columns of two features of integers below 8, which share a table of rows of 3 floats."""
    keys = [tf.feature_column.categorical_column_with_identity(name, 8) for name in "ab"]
    with fc.group_embedding_column_scope("s") if in_group else contextlib.nullcontext():
        return fc.shared_embedding_columns(
            keys, 3, shared_embedding_collection_name="both", **options
        )


@pytest.mark.parametrize("in_group, max_norm", [(False, None), (True, None), (True, 0.5)])
def test_shared_tables_of_stock_columns(sok, fc, in_group, max_norm):
    """Outside of groups, and with a maximum norm, each column had a table of its own."""
    layer = fc.DenseFeatures(shared(fc, in_group, max_norm=max_norm))
    layer = type(layer).from_config(layer.get_config())
    ids = {"a": tf.constant([[1, 2], [3, 3]]), "b": tf.constant([[2, 2], [1, 5]])}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids))
    (table,) = layer.trainable_variables
    rows = table.numpy()
    if max_norm is not None:
        rows *= np.minimum(1, max_norm / np.linalg.norm(rows, axis=1, keepdims=True))
    right = [np.mean(rows[ids[name]], axis=1) for name in "ab"]
    np.testing.assert_allclose(layer(ids), np.concatenate(right, axis=1), atol=1e-6)
    if max_norm is None:
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        of_rows = np.bincount(np.concatenate([*ids.values()], axis=None), minlength=8) / 2
        np.testing.assert_allclose(gradient, np.tile(of_rows[:, None], 3), atol=1e-6)


def test_columns_that_cannot_share_a_table(sok, fc):
    keys = fc.categorical_column_with_embedding("c", tf.int64)
    for dim, category in ((2, shared(fc)[0].categorical_column), (3, keys)):
        other = fc.shared_embedding_columns(
            [category], dim, shared_embedding_collection_name="both"
        )
        with pytest.raises(ValueError, match=r"must have the shape .*Received: \[.* for column"):
            fc.DenseFeatures([shared(fc)[1], *other])
    if hasattr(tf.keras.layers, "DenseFeatures"):  # of tf_keras
        with pytest.raises(NotImplementedError, match="shares its table"):
            tf.keras.layers.DenseFeatures(shared(fc))({name: tf.constant([[1]]) for name in "ab"})


def test_refused(sok, fc):
    layer = fc.DenseFeatures(small_columns(fc), name="inputs")
    with pytest.raises(ValueError, match="must be a dictionary of features by name"):
        layer(tf.constant([[1]]))
    with pytest.raises(ValueError, match="`gradient_scale` must be one of"):
        fc.DenseFeatures(small_columns(fc), gradient_scale="none")
    with pytest.raises(ValueError, match="must have a sequence categorical column"):
        fc.SequenceFeatures(small_columns(fc)[:1])


@pytest.mark.parametrize(
    "feature, dtype, words",
    [
        ("number", "string", "'number' must match.*int64.*string.*dtype tf.string"),
        ("number", "float32", "'number' must match.*int64.*float32.*tf.keras.Input.shape, dtype="),
        ("word", "float32", "'word' must match.*string.*float32.*dtype 'string'"),
        ("word", "int64", "'word' must match.*string.*int64"),
        ("price", "string", "price.*string"),
        ("bucket", "float32", "bucket"),
        ("bucket", "string", "bucket"),
        ("number", None, "number"),
    ],
)
def test_refused_as_the_model_is_built(sok, fc, feature, dtype, words):
    """Inputs that no column could read."""
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        built(fc, {feature: dtype})


def test_right_inputs_of_a_model_are_not_refused(sok, fc):
    assert tuple(built(fc, {"number": "int32", "price": "int64"}).shape) == (None, 8)


def built(fc, dtypes):
    """Outputs of a layer in a model whose inputs have these dtypes; None is no input."""
    stock = tf.feature_column.categorical_column_with_hash_bucket("bucket", 10, tf.int64)
    layer = fc.DenseFeatures([*small_columns(fc), fc.embedding_column(stock, 2)], name="inputs")
    right = {"word": "string", "number": "int64", "price": "float32", "bucket": "int64"}
    dtypes = right | dtypes
    inputs = {n: tf.keras.Input([1], dtype=kind, name=n) for n, kind in dtypes.items() if kind}
    return layer(inputs)


def test_a_step_equals_that_of_stock_columns(on_threads):
    """Each rank has half of the samples; rows of keys go to their owners."""
    right, factors, gradients = cases.expected()

    def check():
        fc, mine = sok.feature_column, slice(2 * sok.rank(), 2 * sok.rank() + 2)
        layer = cases.filled(fc.DenseFeatures(cases.group_columns(fc), name="checked"))
        features = {name: value[mine] for name, value in cases.tensors("ragged").items()}

        def loss_of():
            output = layer(features, training=True)
            return tf.reduce_sum(output * factors[mine].astype(np.float32)), output

        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        _, output = train_step(optimizer, layer.trainable_variables, loss_of)
        np.testing.assert_allclose(output, right[mine], rtol=0, atol=1e-6)
        every = [np.arange(cases.BUCKETS)] * len(layer.tables)
        read = sok.group_embedding_lookup(list(layer.tables.values()), every, training=False)
        rows = dict(zip(layer.tables, read, strict=True))
        for name, found in rows.items():
            expected = cases.rows_of(name, cases.DIMS[name]) - gradients[name]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)
        # A tf.Variable's gradients are averaged over ranks, as all ordinary gradients are.
        expected = cases.rows_of("hashed_embedding", 2) - gradients["hashed_embedding"] / 2
        np.testing.assert_allclose(cases.dense_weight(layer), expected, rtol=0, atol=1e-5)

    on_threads(2, check)
