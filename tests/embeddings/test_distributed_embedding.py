"""`sok.DistributedEmbedding`: its inputs, outputs, arguments and refusals."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

ROWS = {key: np.array([key, key / 2, -key], np.float32) for key in range(1, 20)}
SAMPLES = [[[1, 2], [3]], [[], [4, 4, 5]], [[], []], [[6], [7, 8, 9]]]  # [batch][slot][key]


def combined(combiner, samples=SAMPLES):
    """The expected output in NumPy, `[batch, slot, 3]`."""
    divisor = {"sum": lambda n: 1, "mean": lambda n: n, "sqrtn": np.sqrt}[combiner]

    def of(slot):
        return sum((ROWS[k] for k in slot), np.zeros(3)) / divisor(max(len(slot), 1))

    return np.array([[of(slot) for slot in sample] for sample in samples], np.float32)


def make(sok, combiner="sum", **options):
    options = {"slot_num": 2, "max_nnz": 3, **options}
    layer = sok.DistributedEmbedding(combiner, options.pop("capacity", None), 3, **options)
    sok.assign(layer.embedding_variable, list(ROWS), np.stack(list(ROWS.values())))
    return layer


def ragged(dtype=tf.int64):
    return tf.ragged.constant([slot for sample in SAMPLES for slot in sample], dtype=dtype)


INPUTS = {
    "sparse": lambda: tf.SparseTensor(ragged().to_sparse().indices, ragged().values, [8, 3]),
    "ragged": ragged,
    "ragged of rank 3": lambda: tf.ragged.constant(SAMPLES, dtype=tf.int64),
    "ragged int32": lambda: ragged(tf.int32),
    "ragged with int32 splits": lambda: ragged().with_row_splits_dtype(tf.int32),
}


@pytest.mark.parametrize("combiner, kind", zip(["sum", "mean", "sqrtn"] * 2, INPUTS, strict=False))
def test_inputs_of_any_number_of_keys(sok, kind, combiner):
    layer = make(sok, combiner.capitalize())
    for call in (layer, tf.function(layer)) if "int32" not in kind else (layer,):
        for training in (True, False):
            found = call(INPUTS[kind](), training=training)
            np.testing.assert_allclose(found, combined(combiner), rtol=1e-6)


def test_dense_inputs(sok):
    layer = make(sok, "mean")
    for keys in (np.array([[[1], [2]], [[3], [3]]]), np.array([[[1, 2, 2], [3, 4, 5]]])):
        expected = combined("mean", keys.tolist())
        np.testing.assert_allclose(layer(tf.constant(keys)), expected, rtol=1e-6)
    np.testing.assert_array_equal(layer(tf.constant([[1, 2]])), combined("sum", [[[1], [2]]]))


def test_sparse_rows_cut_off_at_the_end_are_empty(sok):
    keys = tf.SparseTensor([[1, 0]], tf.constant([4], tf.int64), [6, 3])
    found = make(sok)(keys)
    assert found.shape == (3, 2, 3)
    assert (found.numpy()[0, 1] == ROWS[4]).all()
    assert not found.numpy()[1:].any()


def test_empty_batches(sok):
    layer = make(sok)
    for keys in (
        tf.zeros([0, 2], tf.int64),
        tf.zeros([0, 2, 3], tf.int64),
        tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [0, 3]),
        tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), tf.zeros([1], tf.int64)),
    ):
        assert layer(keys).shape == (0, 2, 3)


def test_new_keys_are_inserted_in_training_only(sok):
    """Whose flag may be a tensor."""
    layer = make(sok, embedding_initializer="ones")
    size = int(layer.table.size())

    @tf.function
    def call(keys, training):
        return layer(keys, training=training)

    for one, training, new in (
        (layer, False, 0),
        (call, tf.constant(False), 0),
        (layer, True, 2),
        (call, tf.constant(True), 4),
    ):
        keys = tf.constant([[100 + new, 101 + new]], tf.int64)
        assert (one(keys, training=training).numpy() == 1).all()
        assert int(layer.table.size()) == size + new


# ---- refusals ----


@pytest.mark.parametrize(
    "argument, value, message",
    [
        *(("combiner", value, "must be one of .*Received:") for value in ("max", "", None, 3)),
        ("combiner", "none", "All2AllDenseEmbedding does not combine"),
        ("capacity", -1, "`max_vocabulary_size_per_gpu` must be a positive integer"),
        ("slot_num", 0, "must be a positive integer. Received: slot_num=0"),
        ("max_nnz", 0, "must be a positive integer. Received: max_nnz=0"),
        ("max_nnz", 1.5, "must be a positive integer. Received: max_nnz=1.5"),
        ("max_feature_num", 7, r"\[1, slot_num \* max_nnz\] = \[1, 6\]. Received: .*=7"),
        ("gradient_scale", "avg", "`gradient_scale` must be one of .*gradient_scale='avg'"),
        ("key_dtype", "string", "`key_dtype` must be int64, int32, uint64 or uint32"),
        ("embedding_initializer", "no_such", "no_such"),
    ],
)
def test_arguments_out_of_their_range(sok, argument, value, message):
    with pytest.raises(ValueError, match=message):
        make(sok, **{argument: value})


@pytest.mark.parametrize(
    "keys, kind, message",
    [
        (lambda: tf.constant([1, 2], tf.int64), TypeError, r"The input must be a tf.SparseTensor"),
        (lambda: tf.zeros([2, 3, 1], tf.int64), TypeError, r"The input must be .*Received"),
        (lambda: tf.zeros([2, 2, 1, 1], tf.int64), TypeError, r"The input must be .*Received"),
        (lambda: tf.zeros([2, 2, 4], tf.int64), ValueError, "at most max_nnz=3 keys. Received: 4"),
        (lambda: tf.zeros([2, 2]), TypeError, r"integer dtype. Received: float32.*tf.keras.Input"),
    ],
)
def test_inputs_that_are_refused(sok, keys, kind, message):
    with pytest.raises(kind, match=message):
        make(sok)(keys())


@pytest.mark.parametrize("key", [-1, 10, 2**62])
def test_key_out_of_range_without_hash_table(sok, key):
    layer = sok.DistributedEmbedding("sum", 10, 3, 1, 2, use_hashtable=False, name="rows")
    message = rf"must lie in \[0, 10\). Received: key {key} .*\(table 'rows'\)"
    for training in (True, False):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            layer(tf.constant([[[9, key]]], tf.int64), training=training)


# ---- configuration ----


def test_config(sok):
    initializer = tf.keras.initializers.RandomNormal(0.0, 0.5, seed=3)
    options = {"use_hashtable": False, "key_dtype": tf.int32, "gradient_scale": "mean"}
    layer = sok.DistributedEmbedding(
        *("Mean", 1000, 8, 3, 4, 6), embedding_initializer=initializer, name="fields", **options
    )
    again = sok.DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    keys = tf.constant([[1, 2, 3]], tf.int32)
    assert (layer(keys, training=False).numpy() == again(keys, training=False).numpy()).all()


def test_output_shape(sok):
    layer = make(sok)
    for shape, batch in (((5, 2), 5), ((None, 2, 3), None), ((8, 3), 4), ((None, 3), None)):
        assert tuple(layer.compute_output_shape(shape)) == (batch, 2, 3)
