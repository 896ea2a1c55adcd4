"""Tables of plain variables against the table itself: to the bit, in TensorFlow's own ops."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.lookup import buckets
from sok_like.lookup.exporting import Exporting
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.stock_rows import MissingRows, initial_rows
from sok_like.lookup.stock_table import Asked, StockTable, StockTables, encoded
from tests.training import apply_gradient

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


def missing_rows(table, keys=KEYS, initial=True):
    missing = [MissingRows(table, initial)]
    return tf.function(lambda keys: initial_rows(missing, keys, None))(tf.constant(keys))


@pytest.mark.parametrize("name, dim", zip(INITIALIZERS, [1, 6, 16, 6, 1, 16], strict=True))
def test_a_missing_key_reads_its_initial_row(sok, name, dim):
    table = sok.EmbeddingVariable(dim, name=f"missing_{name}", initializer=INITIALIZERS[name]())
    rows = missing_rows(table)
    expected, found = table.find(KEYS)
    assert not found.numpy().any() and np.abs(expected).max() > 0
    if name in ("uniform", "wide", "ones", "rows"):
        np.testing.assert_array_equal(rows, expected)
    else:
        np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert not missing_rows(table, initial=False).numpy().any()


def test_a_filtered_table_reads_its_value_without_permission(sok):
    option = sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(3),
        init_option=sok.InitializerOption("ones", default_value_no_permission=-2.5),
    )
    table = sok.EmbeddingVariable(2, name="missing_filtered", ev_option=option)
    rows = missing_rows(table)
    np.testing.assert_array_equal(rows, table.find(KEYS)[0])
    assert (rows.numpy() == -2.5).all()


@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16"])
def test_a_missing_key_of_a_table_of_16_bits_reads_what_the_table_holds(sok, row_dtype):
    table = sok.EmbeddingVariable(6, name="missing_narrow", dtype=row_dtype)
    rows = missing_rows(table)
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
        apply_gradient(optimizer, decayed, [1])
    if forgotten:  # as after a restore: the history begins anew
        decayed.load_snapshot(decayed.snapshot())
    keys = KEYS[KEYS != 1]
    rows = missing_rows(decayed, keys)
    np.testing.assert_allclose(rows, fresh.find(keys)[0] * 0.95**3, rtol=1e-6)
    np.testing.assert_allclose(rows, decayed.find(keys)[0], rtol=1e-6)
    if forgotten:
        np.testing.assert_array_equal(rows, decayed.find(keys)[0])


def stock(sok, row_dtype="float32"):
    """A table, its stand-in alone in its variables, and where the keys are."""
    table = sok.EmbeddingVariable(6, name="stock")
    tables, (place,) = stock_of(sok, [table], [PRESENT], row_dtype)
    return table, tables, place


def stock_of(sok, variables, keys, row_dtype="float32"):
    """Tables with these keys and random rows, and where the keys are; None without an index."""
    tables = [
        StockTable(
            v, len(k), MissingRows(v, True), None if v.key_limit else buckets.layout_for(len(k))
        )
        for v, k in zip(variables, keys, strict=True)
    ]
    made, places = StockTables(tables, row_dtype), []
    for large in made.large.values():
        large.assign(tf.zeros(large.shape, large.dtype))
    for table, variable, own_keys in zip(tables, variables, keys, strict=True):
        rows = RANDOM.normal(size=[len(own_keys), table.dim]).astype(np.float32)
        sok.assign(variable, own_keys, rows)
        place = None
        if table.layout is not None:
            place = buckets.place(own_keys, table.layout, 0, table.layout.num_buckets)
            rows = rows[np.searchsorted(own_keys, place.keys[place.is_taken])]
            at = np.arange(table.layout.num_buckets) + table.first_bucket
            made.keys.scatter_nd_update(at[:, None], place.keys)
            numbers = (place.starts() + table.first_row).astype(np.int32)
            made.starts.scatter_nd_update(at[:, None], numbers)
        # The rows of variables without values.
        values = encoded(rows, made.rows[table.dim].dtype, table.table_name)
        at = np.arange(table.first_row, table.first_row + len(rows))[:, None]
        for by_dim, value in zip((made.rows, made.scales), values, strict=False):
            by_dim[table.dim].scatter_nd_update(at, value)
        places.append(place)
    return made, places


def looked_up(made, *asked):
    """The rows of keys `asked` of each table, in one lookup."""
    rows, keys = [None] * len(asked), [tf.constant(keys, tf.int64) for keys in asked]
    for positions, found in made([Asked(*pair) for pair in zip(made.tables, keys, strict=True)]):
        parts = tf.split(found, [len(asked[i]) for i in positions])
        for position, part in zip(positions, parts, strict=True):
            rows[position] = part.numpy()
    return rows


def test_present_and_missing_keys(sok):
    table, made, place = stock(sok)
    keys = np.r_[PRESENT[::-1], KEYS, PRESENT, np.unique(place.keys[~place.is_taken])]
    np.testing.assert_array_equal(looked_up(made, keys)[0], table.find(keys)[0])
    assert looked_up(made, np.zeros([0], np.int64))[0].shape == (0, 6)


def test_tables_of_all_kinds_in_one_lookup(sok):
    """Dims, initializers and key ranges that differ; keys of one table are missing in others."""
    initial = ["uniform", "wide", "normal", "truncated", "ones", "rows", "rows", "uniform"]
    variables = [
        sok.EmbeddingVariable(6 if n % 3 else 4, name=f"stock_{n}", initializer=INITIALIZERS[i]())
        for n, i in enumerate(initial)
    ]
    variables.append(sok.EmbeddingVariable(4, name="bounded", capacity=50, use_hashtable=False))
    random = np.random.default_rng(1)
    keys = [np.unique(random.choice(PRESENT, 40 + 20 * n)) for n in range(len(initial))]
    made, _ = stock_of(sok, variables, [*keys, np.arange(50)])
    different, alike = [300, 1, 0, 70, 20, 60, 5, 400], [50] * 8
    for sizes, source in ((different, PRESENT), (alike, None)):
        asked = [  # all present, or not
            random.choice(own if source is None else np.r_[source, KEYS], size)
            for own, size in zip(keys, sizes, strict=True)
        ]
        asked.append(random.integers(0, 50, 30))
        for variable, own, rows in zip(variables, asked, looked_up(made, *asked), strict=True):
            expected = variable.find(own)[0].numpy()
            np.testing.assert_allclose(rows, expected, atol=1e-6, err_msg=variable.table_name)


@pytest.mark.parametrize("size", [1, 400])
def test_keys_in_their_second_buckets(sok, size):
    """Tables of different widths, nearly full, so that many keys lie there."""
    random = np.random.default_rng(2)
    variables = [sok.EmbeddingVariable(4, name=f"stock_full_{n}") for n in range(3)]
    keys = [np.unique(random.integers(-(2**63), 2**63 - 1, n)) for n in (230, 20_000, 3_600)]
    made, places = stock_of(sok, variables, keys)
    assert len({table.layout.width for table in made.tables}) == 3
    in_second = []
    for own, place in zip(keys, places, strict=True):
        first, _ = buckets.choices(place.keys.ravel(), place.layout)
        numbers = np.arange(len(place.keys))[:, None]
        in_second.append(place.keys[place.is_taken & (first.reshape(place.keys.shape) != numbers)])
        assert len(own) / 60 < len(in_second[-1]) < len(own) / 4
    absent = np.arange(size)
    for others in (in_second, keys, [*in_second[:2], absent], [absent] * 3):
        asked = [random.choice(own, size) for own in others]
        asked_more = [asked[0], np.r_[asked[1], in_second[1][:3]], asked[2]]  # of different sizes
        for batch in (asked, asked_more):
            for variable, own, rows in zip(variables, batch, looked_up(made, *batch), strict=True):
                np.testing.assert_array_equal(rows, variable.find(own)[0])


@pytest.mark.parametrize("row_dtype, bits", [("bfloat16", 8), ("int8", 7)])
def test_narrow_rows_are_near(sok, row_dtype, bits):
    table, made, _ = stock(sok, row_dtype)
    expected = table.find(PRESENT)[0].numpy()
    error = np.abs(looked_up(made, PRESENT)[0] - expected)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (error <= largest * 2.0**-bits).all() and error.max() > 0
    with pytest.raises(ValueError, match="int8 needs finite rows.*'stock'"):
        encoded(np.full([1, 6], np.nan, np.float32), tf.int8, "stock")


def export_of(made, *variables):
    tables = {id(v): table for v, table in zip(variables, made.tables, strict=True)}
    return Exporting(made, tables, {})


@pytest.mark.parametrize(
    "combiner, weighted",
    [("sum", False), ("mean", True), ("mean", False), ("sqrtn", True), ("none", True)],
)
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
        with export_of(made, table).in_progress():
            return lookup([feature], training=True)[0]

    np.testing.assert_array_equal(served(), expected)
    assert int(table.size()) == len(PRESENT)


def test_what_the_layer_refuses_is_refused(sok):
    table, made, _ = stock(sok)
    rows_only = sok.EmbeddingVariable(2, name="bounded", capacity=8, use_hashtable=False)
    bounded, _ = stock_of(sok, [rows_only], [np.arange(8)])
    np.testing.assert_array_equal(looked_up(bounded, [7, 0])[0], rows_only.find([7, 0])[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 8\)"):
        looked_up(bounded, [8])
    splits = tf.constant([0, 3, 4], tf.int64)
    with export_of(made, table).in_progress():
        for options, words in (
            ({"max_hotness": 2}, "at most 2 keys"),
            ({"batch_multiple": 3}, "multiple of 3"),
        ):
            feature = HashFeature(table, tf.constant(PRESENT[:4]), "sum", splits, **options)
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                lookup([feature], training=False)


# ---- lookups of a graph: made together where their keys are known ----


def rows_of(variable, keys, combiner="none"):
    splits = None if combiner == "none" else tf.range(0, tf.size(keys, tf.int64) + 1, 2)
    (found,) = lookup([HashFeature(variable, keys, combiner, splits)], training=False)
    return found


def number_in(found):
    """Keys of rows."""
    return tf.cast(tf.abs(found[:, 0]) * 30, tf.int64)


@pytest.fixture
def tables(sok):
    """Three tables, with keys of their own, and what stands for them."""
    keys, made = np.arange(40), [sok.EmbeddingVariable(d, name=f"together_{d}") for d in (6, 4, 5)]
    stock, _ = stock_of(sok, made, [keys, keys + 7, keys[::2]])
    return made, export_of(stock, *made)


def traced(compute, what):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def served(keys):
        with what.in_progress() as results:
            results.append(compute(keys))
            return results[0]

    return served.get_concrete_function()


def lookups(function):
    """How many there are in the graph itself: each compares the first buckets of its keys."""
    return [op.type for op in function.graph.get_operations()].count("PopulationCount")


def test_lookups_of_a_graph_are_one_lookup(tables):
    (first, second, third), what = tables

    def compute(keys):
        by_first = rows_of(first, keys)
        again = rows_of(first, keys[::-1], "mean")
        by_rows = rows_of(third, number_in(rows_of(first, keys + 9)))  # which are no result
        one_by_one = tf.map_fn(lambda key: rows_of(second, key[tf.newaxis])[0], keys, tf.float32)
        return by_first, again, rows_of(second, keys + 3, "sum"), by_rows, one_by_one, keys

    function = traced(compute, what)
    assert lookups(function) == 2  # by_rows comes after the others
    for size in (2, 30):
        keys = tf.constant(RANDOM.integers(0, 60, size))
        for found, expected in zip(function(keys), compute(keys), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_lookup_whose_rows_nobody_needs_is_left_out(tables):
    (first, second, third), what = tables

    def compute(keys):
        rows_of(third, number_in(rows_of(second, keys)))
        tf.debugging.assert_all_finite(rows_of(first, keys), "an effect")
        return keys + 1

    function = traced(compute, what)
    assert lookups(function) == 1
    assert function(tf.constant([5], tf.int64)).numpy().tolist() == [6]
    assert [v.shape[1] for v in function.graph.variables if v.name.startswith("rows")] == [6]


def test_a_graph_that_changes_variables_keeps_the_order_of_its_lookups(tables):
    (first, second, _), what = tables
    last = tf.Variable(tf.zeros([2], tf.int64))

    def compute(keys):
        by_first = rows_of(first, keys)
        last.assign(number_in(by_first))
        return by_first, rows_of(second, last.read_value())

    keys = tf.constant([3, 11], tf.int64)
    expected = compute(keys)
    last.assign([0, 0])
    function = traced(compute, what)
    assert lookups(function) == 2
    for found, known in zip(function(keys), expected, strict=True):
        np.testing.assert_array_equal(found, known)
