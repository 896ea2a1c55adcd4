"""Groups of columns, keys of strings, and what the constructors refuse."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

fc = sok.feature_column


def keys(key="k", dtype=tf.int64, **arguments):
    return fc.categorical_column_with_embedding(key, dtype, **arguments)


def embed(categorical=None, dimension=2, **arguments):
    return fc.embedding_column(categorical or keys(), dimension, **arguments)


# ---- scopes ----


def test_the_innermost_scope_counts_and_a_name_can_be_entered_again():
    assert embed().group is None
    with fc.group_embedding_column_scope("user") as name:
        assert (name, embed().group) == ("user", "user")
        with fc.group_embedding_column_scope("ads"):
            assert embed().group == "ads"
        assert embed().group == "user"
    with fc.group_embedding_column_scope("user"):
        shared = fc.shared_embedding_columns([keys("a"), keys("b")], 2)
        assert [c.group for c in shared] == ["user", "user"]
    with pytest.raises(KeyError), fc.group_embedding_column_scope("broken"):
        raise KeyError
    assert embed().group is None


def test_scopes_without_a_name_are_different_groups():
    groups = []
    for _ in range(2):
        with fc.group_embedding_column_scope():
            groups += [embed().group, embed().group]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_a_scope_is_its_threads_own():
    seen = []
    with fc.group_embedding_column_scope("mine"):
        thread = threading.Thread(target=lambda: seen.append(embed().group))
        thread.start()
        thread.join()
    assert seen == [None]


def test_names_of_scopes():
    for name in ("", 3):
        with pytest.raises(ValueError, match="`name` must be None or a non-empty string"):
            with fc.group_embedding_column_scope(name):
                pass


# ---- keys ----


def test_keys_of_strings_are_farmhash_and_integers_are_keys_as_they_are():
    strings, numbers = ["", "a", "x" * 300, "Zürich"], np.array([0, -1, 2**63 - 1, -(2**63)])
    for given, dtype, right in (
        (strings, tf.string, sok.keys_of(strings)),
        (numbers, tf.int64, numbers),
        (numbers.view(np.uint64), tf.uint64, numbers),
    ):
        found = keys("k", dtype).to_keys(tf.constant(given))
        np.testing.assert_array_equal(found, right)


def test_parsing_examples():
    columns = [embed(keys("text", tf.string)), embed(keys("number", tf.int32))]
    assert tf.feature_column.make_parse_example_spec(columns) == {
        "text": tf.io.VarLenFeature(tf.string),
        "number": tf.io.VarLenFeature(tf.int64),
    }


# ---- constructors ----


def test_columns_are_stock_columns():
    made = embed(combiner="sum")
    stock = tf.feature_column.embedding_column(made.categorical_column, 2)
    assert isinstance(made, type(stock)) and made.name == "k_embedding"
    assert made.variable_shape == [2]
    assert made.initializer.get_config() == stock.initializer.get_config()
    assert fc.shared_embedding_columns([made.categorical_column], 2)[0].name == "k_shared_embedding"


def test_an_option_brings_its_initializer():
    option = sok.EmbeddingVariableOption(init_option=sok.InitializerOption("ones"))
    column = keys(ev_option=option)
    assert embed(column).initializer == "ones"
    with pytest.raises(ValueError, match="`initializer` must be given once"):
        embed(column, initializer=tf.keras.initializers.Zeros())


def test_sparse_column():
    made = fc.sparse_column_with_embedding("k", tf.int64, partition_num=4)
    assert made == keys(partition_num=4)
    assert hash(made) == hash(keys())
    counter = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    for given in ({}, {"evconfig": counter}, {"ev_option": counter}):
        option = fc.sparse_column_with_embedding("k", steps_to_live=5, **given).ev_option
        assert option.filter_option == (sok.CounterFilter(2) if given else None)
        assert option.evictions == (sok.GlobalStepEvict(5),)


STEPS = sok.EmbeddingVariableOption(evict_option=sok.GlobalStepEvict(4))


def sparse_column(**arguments):
    return fc.sparse_column_with_embedding("k", **arguments)


def share(*columns):
    return fc.shared_embedding_columns(list(columns), 2)


def identity(name, buckets):
    return tf.feature_column.categorical_column_with_identity(name, buckets)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: embed(dimension=0), "`dimension` must be a positive integer.*0.*'k'"),
        (lambda: embed(dimension=None), "`dimension` must be a positive integer.*None"),
        (lambda: embed(combiner="max"), "`combiner` must be 'mean', 'sum' or 'sqrtn'.*'max'"),
        (lambda: embed(initializer=3), "`initializer` must be callable.*3"),
        (lambda: embed(max_norm=1.0), "`max_norm` and `ckpt_to_load_from` must be None.*'k'"),
        (lambda: embed(ckpt_to_load_from="c", tensor_name_in_ckpt="t"), "be None for column 'k'"),
        (lambda: embed(identity("i", 3), ckpt_to_load_from="c"), "must be given together"),
        (lambda: embed(tf.feature_column.numeric_column("n")), "A categorical column is required"),
        (lambda: keys(""), "`key` must be a non-empty string"),
        (lambda: keys(dtype=tf.float32), "`dtype` must be string, int64.*float32"),
        (lambda: keys(partition_num=0), "`partition_num` must be None or a positive"),
        (lambda: share(), "at least one column"),
        (lambda: share(identity("i", 3), identity("j", 4)), "the same number of buckets.*i, j"),
        (lambda: share(keys(), identity("j", 4)), "keys of one dtype"),
        (lambda: share(keys(), keys("l", tf.int32)), "keys of one dtype"),
        (lambda: share(keys(), keys("l", tf.string)), "keys of one dtype"),
        (lambda: sparse_column(init_data_source="file"), "`init_data_source` must be None"),
        (lambda: sparse_column(steps_to_live=3, evconfig=STEPS), "once.*column 'k'"),
        (lambda: sparse_column(evconfig=STEPS, ev_option=STEPS), "this name or as `evconfig`"),
    ],
)
def test_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_an_option_of_another_class():
    with pytest.raises(TypeError, match="`ev_option` must be None or a sok.Embedding"):
        keys(ev_option=sok.CounterFilter(3))
