"""Tables of plain variables against the table itself: to the bit, in TensorFlow's own ops."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.exporting import Exporting, exporting
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.stock_rows import MissingRows
from sok_like.lookup.stock_table import StockTable, encoded

RANDOM = np.random.default_rng(0)
KEYS = np.r_[RANDOM.integers(-(2**63), 2**63 - 1, 300), [0, -1, 2**63 - 1, -(2**63)]]
PRESENT = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 500))
KERAS = tf.keras.initializers
INITIALIZERS = {
    "uniform": lambda: KERAS.RandomUniform(-0.05, 0.05),
    "wide": lambda: KERAS.RandomUniform(-3, 100, seed=5),
    "normal": lambda: KERAS.RandomNormal(1.0, 2.0),
    "truncated": lambda: KERAS.TruncatedNormal(0.0, 3.0),
    "ones": lambda: "ones",
    "rows": lambda: "orthogonal",  # default rows by key
}


@pytest.mark.parametrize("dim", [1, 6, 16])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_missing_key_reads_its_initial_row(sok, name, dim):
    if name == "rows" and dim == 1:
        pytest.skip("orthogonal needs two columns")
    table = sok.EmbeddingVariable(dim, name=f"missing_{name}", initializer=INITIALIZERS[name]())
    rows = tf.function(MissingRows(table, True))(tf.constant(KEYS))
    expected, found = table.find(KEYS)
    assert not found.numpy().any() and np.abs(expected).max() > 0
    if name in ("uniform", "wide", "ones", "rows"):
        np.testing.assert_array_equal(rows, expected)
    else:
        np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert not MissingRows(table, False)(tf.constant(KEYS)).numpy().any()


def test_a_filtered_table_reads_its_value_without_permission(sok):
    option = sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(3),
        init_option=sok.InitializerOption("ones", default_value_no_permission=-2.5),
    )
    table = sok.EmbeddingVariable(2, name="missing_filtered", ev_option=option)
    rows = MissingRows(table, True)(tf.constant(KEYS))
    np.testing.assert_array_equal(rows, table.find(KEYS)[0])
    assert (rows.numpy() == -2.5).all()


@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16"])
def test_a_missing_key_of_a_table_of_16_bits_reads_what_the_table_holds(sok, row_dtype):
    table = sok.EmbeddingVariable(6, name="missing_narrow", dtype=row_dtype)
    rows = MissingRows(table, True)(tf.constant(KEYS))
    np.testing.assert_array_equal(rows, table.find(KEYS)[0])
    np.testing.assert_array_equal(rows, tf.cast(tf.cast(rows, row_dtype), tf.float32))
    wide = sok.EmbeddingVariable(6, name="missing_narrow")
    np.testing.assert_allclose(rows, wide.find(KEYS)[0], rtol=2.0**-8, atol=1e-7)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_missing_key_reads_its_row_after_weight_decay(sok, tmp_path, forgotten):
    def table():
        return sok.EmbeddingVariable(6, name="missing_decayed")

    decayed, fresh = table(), table()
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1, weight_decay=0.5))
    for _ in range(3):
        gradient = tf.IndexedSlices(tf.ones([1, 6]), tf.constant([1], tf.int64))
        optimizer.apply_gradients([(gradient, decayed)])
    if forgotten:  # as after a restore: the history begins anew
        decayed.load_snapshot(**decayed.snapshot().fields())
    keys = KEYS[KEYS != 1]
    rows = MissingRows(decayed, True)(tf.constant(keys))
    np.testing.assert_allclose(rows, fresh.find(keys)[0] * 0.95**3, rtol=1e-6)
    np.testing.assert_allclose(rows, decayed.find(keys)[0], rtol=1e-6)
    if forgotten:
        np.testing.assert_array_equal(rows, decayed.find(keys)[0])


def stock(sok, row_dtype="float32"):
    table = sok.EmbeddingVariable(6, name="stock")
    rows = RANDOM.normal(size=[len(PRESENT), 6]).astype(np.float32)
    sok.assign(table, PRESENT, rows)
    layout = buckets.layout_for(len(PRESENT))
    place = buckets.place(PRESENT, layout, 0, layout.num_buckets)
    made = StockTable(table, layout, len(PRESENT), row_dtype, MissingRows(table, True))
    made.keys.assign(place.keys)
    made.starts.assign(place.starts().astype(np.int32))
    fill(made, rows[np.searchsorted(PRESENT, place.keys[place.is_taken])])
    return table, made, place


def fill(made, rows):
    """Gives the variables of a table without values their rows."""
    values = encoded(rows, made.rows.dtype, made.table_name)
    for variable, value in zip((made.rows, made.scales), values, strict=False):
        variable.assign(value)


def test_present_and_missing_keys(sok):
    table, made, place = stock(sok)
    keys = np.r_[PRESENT[::-1], KEYS, PRESENT, np.unique(place.keys[~place.is_taken])]
    np.testing.assert_array_equal(tf.function(made)(tf.constant(keys)), table.find(keys)[0])
    np.testing.assert_array_equal(made(tf.zeros([0], tf.int64)), np.zeros([0, 6]))


@pytest.mark.parametrize("row_dtype, bits", [("bfloat16", 8), ("int8", 7)])
def test_narrow_rows_are_near(sok, row_dtype, bits):
    table, made, _ = stock(sok, row_dtype)
    expected = table.find(PRESENT)[0].numpy()
    error = np.abs(made(tf.constant(PRESENT)).numpy() - expected)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (error <= largest * 2.0**-bits).all() and error.max() > 0
    with pytest.raises(ValueError, match="int8 needs finite rows.*'stock'"):
        fill(stock(sok, "int8")[1], np.full([1, 6], np.nan, np.float32))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combined_rows_have_the_bits_of_the_op(sok, combiner, weighted):
    table, made, _ = stock(sok)
    keys = tf.constant(np.r_[PRESENT, KEYS])
    splits = np.sort(np.r_[0, RANDOM.integers(0, len(keys), 200), len(keys)])
    weights = RANDOM.normal(size=len(keys)).astype(np.float32)
    weights[splits[5] : splits[9]] = 0.0
    feature = HashFeature(
        table, keys, combiner, tf.constant(splits), tf.constant(weights) if weighted else None
    )
    (expected,) = lookup([feature], training=False)

    @tf.function
    def served():
        with exporting(Exporting({id(table): made}, {})):
            return lookup([feature], training=True)[0]

    np.testing.assert_array_equal(served(), expected)
    assert int(table.size()) == len(PRESENT)


def test_what_the_layer_refuses_is_refused(sok):
    table, made, _ = stock(sok)
    rows_only = sok.EmbeddingVariable(2, name="bounded", capacity=8, use_hashtable=False)
    bounded = StockTable(rows_only, None, 8, "float32", MissingRows(rows_only, True))
    fill(bounded, rows_only.find(np.arange(8))[0].numpy())
    np.testing.assert_array_equal(bounded(tf.constant([7, 0], tf.int64)), rows_only.find([7, 0])[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 8\)"):
        bounded(tf.constant([8], tf.int64))
    splits = tf.constant([0, 3, 4], tf.int64)
    with exporting(Exporting({id(table): made}, {})):
        for options, words in (
            ({"max_hotness": 2}, "at most 2 keys"),
            ({"batch_multiple": 3}, "multiple of 3"),
        ):
            feature = HashFeature(table, tf.constant(PRESENT[:4]), "sum", splits, **options)
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                lookup([feature], training=False)
