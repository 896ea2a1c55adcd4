"""`pad_key` of both layers: forms of input, dtypes, configuration, refusals."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
KEYS = [[[3, 9, 9, 4], [9, 9, 9, 9]], [[5, 9, 9, 9], [3, 3, 4, 9]]]  # 9 is padding
VALID = [[[3, 4], []], [[5], [3, 3, 4]]]


def make(sok, pad_key, combiner="mean", **options):
    layer = sok.DistributedEmbedding(combiner, None, 1, 2, 3, pad_key=pad_key, **options)
    sok.assign(layer.table, [3, 4, 5, 9, -1], [[3.0], [4.0], [5.0], [1000.0], [100.0]])
    return layer


def expected(combiner):
    divisor = {"sum": lambda n: 1, "mean": lambda n: n, "sqrtn": np.sqrt}[combiner]
    return [[[sum(s) / divisor(max(len(s), 1))] for s in sample] for sample in VALID]


@pytest.mark.parametrize(
    "combiner, dtype", [("sum", tf.int64), ("mean", tf.int32), ("sqrtn", tf.uint64)]
)
def test_inputs_of_any_kind(sok, combiner, dtype):
    """Longer than `max_nnz`."""
    layer = make(sok, 9, combiner)
    dense = tf.constant(KEYS, dtype)
    ragged = tf.RaggedTensor.from_tensor(tf.reshape(tf.constant(KEYS, tf.int64), [4, 4]))
    for keys in (dense, ragged, ragged.to_sparse()):
        np.testing.assert_allclose(layer(keys), expected(combiner), rtol=1e-6)
    np.testing.assert_allclose(tf.function(layer)(dense), expected(combiner), rtol=1e-6)


@pytest.mark.parametrize(
    "pad_key, dtype, keys, rows",
    [
        (9, "int64", [[3, 9], [9, 5]], [[[3], [0]], [[0], [5]]]),  # one key per field
        (2**64 - 1, "uint64", [[[3, 2**64 - 1], [4, 5]]], [[[3], [9]]]),
        (2**64 - 1, "int64", [[[3, -1], [4, 5]]], [[[3], [9]]]),
        (None, "int64", [[[3, -1], [4, 5]]], [[[103], [9]]]),
    ],
)
def test_a_key_may_be_padding(sok, pad_key, dtype, keys, rows):
    layer = make(sok, pad_key, "sum")
    again = type(layer).from_config({**layer.get_config(), "name": "again"})
    assert layer(tf.constant(keys, dtype)).numpy().tolist() == rows
    again(tf.constant(keys, dtype))
    assert int(again.table.size()) == np.unique(keys).size - (pad_key is not None)


def test_padding_needs_no_row_without_a_hash_table(sok):
    options = {"use_hashtable": False, "embedding_initializer": "ones", "pad_key": -1}
    layer = sok.DistributedEmbedding("sum", 4, 1, 1, 2, **options)
    assert layer(tf.constant([[[3, -1]], [[-1, -1]]])).numpy().tolist() == [[[1]], [[0]]]


def test_too_many_valid_keys_are_still_refused(sok):
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 3"):
        make(sok, 9)(tf.constant([[[3, 4, 5, 3, 9], [9, 9, 9, 9, 9]]], tf.int64))


def test_all_to_all_of_a_flat_list(sok):
    layer = sok.All2AllDenseEmbedding(
        None, 2, 1, 1, dynamic_input=True, embedding_initializer="ones", pad_key=0
    )
    for call in (layer, tf.function(layer)):
        rows = call(tf.constant([0, 7, 0, 7, 8], tf.int64))
        assert rows.numpy().tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [1, 1]]
    assert int(layer.table.size()) == 2


@pytest.mark.parametrize("pad_key", ["0", 1.5, True, 2**64, -(2**63) - 1])
def test_refused(sok, pad_key):
    with pytest.raises(ValueError, match="`pad_key` must be None or an integer.*pad_key="):
        make(sok, pad_key)
