"""`EmbeddingVariable(dtype=...)`: rows of 16 bits behind every way to read, train and save them."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.training import apply_gradient

pytestmark = pytest.mark.keras(slow=True)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KEYS = np.array([3, -1, 2**40, 0, 17], np.int64)
DIM = 5


def nearest(rows, dtype):
    return np.asarray(rows, np.float32).astype(DTYPES[dtype]).astype(np.float32)


def values(shape=(5, DIM), seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def filled(sok, dtype, **kwargs):
    variable = sok.EmbeddingVariable(DIM, name="items", dtype=dtype, **kwargs)
    sok.assign(variable, KEYS, values())
    return variable, nearest(values(), dtype)


def test_what_it_says_of_itself(sok):
    for dtype in (tf.bfloat16, "bfloat16", ml_dtypes.bfloat16):
        variable = sok.EmbeddingVariable(3, dtype=dtype)
        assert variable.row_dtype == tf.bfloat16
        assert variable.dtype == tf.float32  # what lookups give
        assert variable.get_config()["dtype"] == "bfloat16"
    for dtype in (None, "float32", tf.float32):
        assert sok.EmbeddingVariable(3, dtype=dtype).row_dtype == tf.float32
    for dtype in ("float64", "int8", tf.int32, 1, "half-float", tf.string):
        with pytest.raises(ValueError, match="`dtype` must be None or one of.*'rows'"):
            sok.EmbeddingVariable(3, name="rows", dtype=dtype)


def test_other_doors_take_the_dtype(sok):
    for dtype in (None, "bfloat16", "float16"):
        layer = sok.All2AllDenseEmbedding(None, 8, 4, 1, row_dtype=dtype, name="items")
        assert layer.get_config()["row_dtype"] == dtype
        assert layer.embedding_variable.row_dtype == tf.as_dtype(dtype or "float32")
    table = sok.get_embedding_variable("items", DIM, value_dtype=tf.bfloat16)
    assert table.row_dtype == tf.bfloat16
    assert sok.get_embedding_variable("items", DIM, value_dtype="bfloat16") is table
    for other in (None, tf.float16):
        with pytest.raises(ValueError, match="exists with dtype='bfloat16'"):
            sok.get_embedding_variable("items", DIM, value_dtype=other)


def test_what_16_bits_cannot_hold_is_refused(sok):
    with pytest.raises(ValueError, match="`embedding_dim` must be at most 4096.*5000"):
        sok.EmbeddingVariable(5000, dtype="bfloat16")
    large = tf.keras.initializers.Constant(1e6)
    with pytest.raises(ValueError, match="`initializer` must be within .*the range of float16"):
        sok.EmbeddingVariable(3, dtype="float16", initializer=large)
    sok.EmbeddingVariable(3, dtype="bfloat16", initializer=large)


@pytest.mark.parametrize(
    "dtype, training, compiled",
    [("bfloat16", True, False), ("bfloat16", False, True), ("float16", True, True)],
)
def test_every_lookup_reads_the_rounded_rows(sok, dtype, training, compiled):
    variable, rows = filled(sok, dtype)
    weights = values([4], 1)
    ids = tf.RaggedTensor.from_row_splits(KEYS[[0, 1, 1, 4]], [0, 3, 3, 4])

    def read():
        gathered = sok.group_embedding_lookup([variable], [KEYS[::-1]], training=training)[0]
        summed, meant = sok.group_embedding_lookup_sparse(
            [variable, variable], [ids, ids], ["sum", "mean"], training=training
        )
        weighted = sok.group_embedding_lookup_sparse(
            [variable], [ids], "sum", sp_weights=[ids.with_values(weights)], training=training
        )[0]
        return gathered, summed, meant, weighted

    gathered, summed, meant, weighted = (tf.function(read) if compiled else read)()
    np.testing.assert_array_equal(gathered, rows[::-1])
    sums = [rows[0] + rows[1] + rows[1], np.zeros(DIM), rows[4]]
    np.testing.assert_allclose(summed, sums, atol=1e-6)
    np.testing.assert_allclose(meant, np.array(sums) / [[3], [1], [1]], atol=1e-6)
    by_weight = weights[:, None] * rows[[0, 1, 1, 4]]
    np.testing.assert_allclose(
        weighted, [by_weight[:3].sum(axis=0), np.zeros(DIM), by_weight[3]], atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dump_holds_every_bit(sok, dtype, tmp_path):
    variable, rows = filled(sok, dtype)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    apply_gradient(optimizer, variable, KEYS, values(seed=4))
    expected = variable.find(KEYS)[0].numpy()
    assert (expected != rows).any()
    for copied in (copy.deepcopy(variable), pickle.loads(pickle.dumps(variable))):
        assert copied.row_dtype == variable.row_dtype
        np.testing.assert_array_equal(copied.find(KEYS)[0], expected)
    wide = sok.EmbeddingVariable(DIM, name="items")
    sok.assign(wide, KEYS, values())
    saver, checkpoint = sok.Saver(), str(tmp_path / "checkpoint")
    saver.dump_to_file(variable, tmp_path / dtype)
    saver.dump_to_file(wide, tmp_path / "float32")
    checkpoint = tf.train.Checkpoint(variable=variable).save(checkpoint)

    def read(of, into):
        again = sok.EmbeddingVariable(DIM, name="items", dtype=into)
        saver.restore_from_file(again, tmp_path / of)
        return again.find(KEYS)[0]

    np.testing.assert_array_equal(read(dtype, dtype), expected)
    np.testing.assert_array_equal(read(dtype, "float32"), expected)
    np.testing.assert_array_equal(read("float32", dtype), nearest(values(), dtype))
    again = sok.EmbeddingVariable(DIM, name="items", dtype=dtype)
    tf.train.Checkpoint(variable=again).restore(checkpoint).assert_consumed()
    np.testing.assert_array_equal(again.find(KEYS)[0], expected)
