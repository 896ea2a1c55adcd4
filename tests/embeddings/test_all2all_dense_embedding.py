"""`sok.All2AllDenseEmbedding`: its inputs, outputs, arguments and refusals."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

ROWS = np.arange(40, dtype=np.float32).reshape(20, 2)


def make(sok, slot_num=2, nnz_per_slot=3, capacity=None, **options):
    layer = sok.All2AllDenseEmbedding(capacity, 2, slot_num, nnz_per_slot, **options)
    sok.assign(layer.embedding_variable, np.arange(20), ROWS)
    return layer


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 6), (0, 2, 3), (0, 6)])
def test_inputs_of_any_shape(sok, shape):
    layer = make(sok)
    keys = np.random.default_rng(0).integers(0, 20, shape)
    expected = ROWS[keys.reshape(-1, 2, 3)]
    for call in (layer, tf.function(layer)) if shape in ((4, 2, 3), (0, 6)) else (layer,):
        for training in (True, False):
            found = call(tf.constant(keys), training=training).numpy()
            assert found.shape == expected.shape
            assert (found == expected).all()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint32", "uint64"])
def test_keys_of_every_integer_dtype(sok, dtype):
    found = make(sok, 1, 1)(tf.constant([[[7]]], dtype)).numpy()
    assert (found == ROWS[7]).all()


def test_uint64_keys_beyond_int64(sok):
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, key_dtype="uint64")
    keys = np.array([2**63, 2**64 - 1, 1], np.uint64)
    layer(tf.constant(keys))
    assert sok.export(layer.embedding_variable)[0].numpy().tolist() == [1, 2**63, 2**64 - 1]


def test_dynamic_input_takes_what_unique_gives(sok):
    layer = make(sok, dynamic_input=True)

    @tf.function
    def call(keys):
        unique = tf.unique(keys)
        return tf.gather(layer(unique.y), unique.idx)

    for number in (9, 0, 4):
        keys = np.random.default_rng(1).integers(0, 20, number)
        assert (call(tf.constant(keys)).numpy() == ROWS[keys]).all()


@pytest.mark.parametrize(
    "keys, kind, message",
    [
        (lambda: tf.ragged.constant([[1]]), TypeError, "must be a dense tensor of integers"),
        (lambda: tf.sparse.from_dense([[1]]), TypeError, "must be a dense tensor of integers"),
        (lambda: tf.zeros([2, 5], tf.int64), ValueError, r"must have the shape \[batch, 2, 3\]"),
        (lambda: tf.zeros([6], tf.int64), ValueError, r"dynamic_input=True"),
        (lambda: tf.zeros([24], tf.int64), ValueError, r"must have the shape \[batch, 2, 3\]"),
        (lambda: tf.zeros([2, 2, 6], tf.int64), ValueError, r"shape \[batch, 2, 3\]"),
        (lambda: tf.zeros([2, 6]), TypeError, r"integer dtype. Received: float32.*tf.keras.Input"),
    ],
)
def test_inputs_that_are_refused(sok, keys, kind, message):
    with pytest.raises(kind, match=message):
        make(sok)(keys())


def test_number_of_keys_that_is_no_multiple(sok):
    layer = make(sok, name="triples")

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def call(keys):
        return layer(keys)

    assert call(tf.zeros([2, 6], tf.int64)).shape == (2, 2, 3, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"multiple of 6.*7.*'triples'"):
        call(tf.zeros([1, 7], tf.int64))


def test_config(sok):
    for value in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="`nnz_per_slot` must be a positive integer. Received"):
            sok.All2AllDenseEmbedding(None, 2, 2, value)
    layer = sok.All2AllDenseEmbedding(
        100, 4, 3, 2, True, False, key_dtype="int32", embedding_initializer="ones", name="fields"
    )
    config = layer.get_config()
    assert (config["dynamic_input"], config["use_hashtable"]) == (True, False)
    again = sok.All2AllDenseEmbedding.from_config(config)
    assert again.get_config() == config
    assert (again(tf.constant([3])).numpy() == 1).all()


def test_output_shape(sok):
    assert tuple(make(sok).compute_output_shape((5, 6))) == (5, 2, 3, 2)
    assert tuple(make(sok).compute_output_shape((None, 2, 3))) == (None, 2, 3, 2)
    assert tuple(make(sok, dynamic_input=True).compute_output_shape((None,))) == (None, 2)
