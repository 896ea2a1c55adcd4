"""Keys of strings, as the layers give them; and floats, which stand for keys in loaded models."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras

NAMES = ["ann", "bob", "", "Zürich", "1"]


def test_values_and_kinds(sok):
    keys = sok.keys_of(NAMES)
    assert keys.dtype == tf.int64 and len(set(keys.numpy().tolist())) == len(NAMES)
    for name, key in zip(NAMES, keys.numpy().tolist(), strict=True):
        # TensorFlow's own hash into buckets is the fingerprint modulo their number.
        assert (key % 2**64) % 2**31 == tf.strings.to_hash_bucket_fast(name, 2**31)
    for given in (np.array(NAMES), np.array(NAMES, object), tf.constant(NAMES), tuple(NAMES)):
        np.testing.assert_array_equal(sok.keys_of(given), keys)
    assert sok.keys_of("bob").numpy() == keys[1].numpy()
    assert sok.keys_of([["ann"], ["bob"]]).shape == (2, 1)
    ragged = tf.ragged.constant([["ann"], [], ["bob", ""]])
    assert sok.keys_of(ragged).to_list() == [[keys[0]], [], [keys[1], keys[2]]]
    assert sok.keys_of(tf.sparse.from_dense([["bob", ""]])).values.numpy() == keys[1].numpy()
    in_graph = tf.data.Dataset.from_tensor_slices(NAMES).map(sok.keys_of)
    assert list(in_graph.as_numpy_iterator()) == keys.numpy().tolist()


def test_every_length_against_tensorflows_op(sok):
    random = np.random.default_rng(3)
    texts = [random.bytes(length) for length in [*range(200), 1000, 4095, 65536] for _ in range(3)]
    stock = tf.raw_ops.Fingerprint(data=tf.constant(texts), method="farmhash64")
    expected = stock.numpy().view("<i8").ravel()
    assert len(set(expected.tolist())) > 600
    np.testing.assert_array_equal(sok.keys_of(texts), expected)
    many = tf.constant(texts * 20)  # for several threads
    np.testing.assert_array_equal(sok.keys_of(many), np.tile(expected, 20))


def test_a_graph_needs_no_op_of_ours(sok):
    graph = tf.function(sok.keys_of).get_concrete_function(tf.TensorSpec([None], tf.string)).graph
    assert not [op.type for op in graph.get_operations() if op.type.startswith("Sok")]


@pytest.mark.parametrize("given", [[1], 1.5, None, ["a", 1], ["a", None], [], tf.constant([True])])
def test_other_values_raise(sok, given):
    with pytest.raises(TypeError, match="`strings` must be strings. Received"):
        sok.keys_of(given)


def test_rows_of_strings_by_hand(sok):
    layer = sok.GroupEmbedding({"name": 2}, combiners="sum")
    table = layer.tables["name"]
    sok.assign(table, sok.keys_of(["ann", "bob"]), [[1.0, 2.0], [3.0, 4.0]])
    found = layer({"name": tf.constant(["bob", "ann"])}, training=False)["name"]
    np.testing.assert_array_equal(found, [[3, 4], [1, 2]])
    np.testing.assert_array_equal(table.find(sok.keys_of(["ann"]))[0], [[1, 2]])


# ---- models that Keras builds with floats ----

IDS = np.arange(16).reshape(8, 2)
FEATURES = {"a": np.arange(8), "b": np.array(list("abcdefgh"))}


@tf.keras.utils.register_keras_serializable("tests")
class Subclassed(tf.keras.Model):
    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        import sok_like as sok

        self.kind = kind
        self.rows = {
            "distributed": lambda: sok.DistributedEmbedding("sum", None, 4, 2, 1, name="rows"),
            "all2all": lambda: sok.All2AllDenseEmbedding(None, 4, 2, 1, name="rows"),
            "group": lambda: sok.GroupEmbedding({"a": 4, "b": 4}, name="rows"),
        }[kind]()
        self.flatten, self.head = tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)

    def call(self, inputs):
        rows = self.rows(inputs)
        both = tf.concat([rows["a"], rows["b"]], 1) if self.kind == "group" else rows
        return self.head(self.flatten(both))

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras saves no subclassed model by its config")
@pytest.mark.parametrize("kind", ["distributed", "all2all", "group"])
def test_a_subclassed_model_is_loaded_whole(sok, tmp_path, kind):
    """Keras 3 builds it with symbolic floats, and leaves out what it could not build."""
    model, inputs = Subclassed(kind), FEATURES if kind == "group" else IDS
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse")
    data = tf.data.Dataset.from_tensor_slices((inputs, np.ones([8, 1], np.float32))).batch(4)
    model.fit(data, verbose=0)
    expected = model.predict(data, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(data, verbose=0), expected)
