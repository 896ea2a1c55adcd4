"""`sok.GroupEmbedding`: kinds of features, shared tables, configuration, and training in `fit`."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sok_like

pytestmark = pytest.mark.keras


def row(layer, table, key):
    """The row of an integer or a string, read from the table itself."""
    key = sok_like.keys_of([key])[0] if isinstance(key, str) else key
    return layer.tables[table].find([key])[0][0].numpy()


def test_every_kind_of_feature(sok):
    layer = sok.GroupEmbedding(
        {"user": 4, "pair": 4, "tags": 2, "seen": 4},
        tables={"pair": "user"},
        combiners={"pair": "sum", "tags": "mean", "seen": "sqrtn"},
    )
    assert sorted(layer.tables) == ["seen", "tags", "user"]
    seen = [[0, 0], [0, 1], [1, 0]], tf.constant([1, 2, 3], tf.int64), [2, 2]
    found = layer(
        {
            "user": tf.constant([7, -1], tf.int64),
            "pair": tf.constant([[7, 8], [9, 9]], tf.int32),
            "tags": tf.ragged.constant([["a", "b", "a"], []]),
            "seen": tf.SparseTensor(*seen),
            "not asked for": tf.constant([1.0]),
        }
    )

    def sums(table, *samples):
        return [sum((row(layer, table, key) for key in keys), 0.0) for keys in samples]

    expected = {
        "user": sums("user", [7], [-1]),
        "pair": sums("user", [7, 8], [9, 9]),
        "tags": [sums("tags", "aba")[0] / 3, np.zeros(2)],
        "seen": [sums("seen", [1, 2])[0] / np.sqrt(2), row(layer, "seen", 3)],
    }
    assert list(found) == ["user", "pair", "tags", "seen"]
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-6)
    assert int(layer.tables["user"].size()) == 4


def test_lists_and_padding(sok):
    layer = sok.GroupEmbedding([2, 2], tables=["shared", "shared"], combiners="sum", pad_key=0)
    first, second = layer([tf.constant([[3, 0, 4], [0, 0, 0]]), tf.constant([3, 0])])
    np.testing.assert_allclose(first[0], row(layer, "shared", 3) + row(layer, "shared", 4))
    np.testing.assert_array_equal(first[1], [0, 0])
    np.testing.assert_allclose(second, [row(layer, "shared", 3), [0, 0]])
    assert sorted(sok.export(layer.tables["shared"])[0].numpy()) == [3, 4]
    words = sok.GroupEmbedding({"tags": 2}, combiners="sum", pad_key="")
    found = words({"tags": tf.constant([["x", ""]])})["tags"]
    np.testing.assert_allclose(found[0], row(words, "tags", "x"))
    assert int(words.tables["tags"].size()) == 1


def test_padding_of_ragged_and_sparse_features(sok):
    """`tf.strings.split("", "|")` is one empty string, ragged."""
    layer = sok.GroupEmbedding({"tags": 2}, combiners="mean", pad_key="")
    ragged = tf.strings.split(tf.constant(["x|y", "", "y|"]), "|")
    sparse = tf.SparseTensor([[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]], ragged.values, [3, 2])
    x, y = (row(layer, "tags", name) for name in "xy")
    for tags in (ragged, sparse):
        found = layer({"tags": tags})["tags"]
        np.testing.assert_allclose(found, [(x + y) / 2, [0, 0], y], rtol=1e-6)
    assert int(layer.tables["tags"].size()) == 2
    numbers = sok.GroupEmbedding({"n": 2}, combiners="sum", pad_key=0)
    numbers({"n": tf.ragged.constant([[1, 0], [0]])})
    assert int(numbers.tables["n"].size()) == 1
    numbers.tables["n"].clear()
    assert numbers({"n": tf.ragged.constant([["0"]])})["n"].shape == (1, 2)  # strings have none


@pytest.mark.parametrize(
    "dims, options, words",
    [
        ({}, {}, "embedding_dims"),
        (16, {}, "embedding_dims"),
        ({"a": 0}, {}, "positive integers"),
        ({"a": 2, "b": 3}, {"tables": {"b": "a"}}, "same width, 2"),
        ({"a": 2}, {"tables": {"c": "a"}}, "tables"),
        ([2, 2], {"tables": ["a"]}, "tables"),
        ({"a": 2}, {"combiners": "max"}, "combiner"),
        ({"a": 2}, {"combiners": {"a": "max"}}, "one of .None, 'sum', 'mean', 'sqrtn'.*'max'"),
        ({"a": 2}, {"combiners": {"b": "sum"}}, "combiners"),
        ({"a": 2}, {"combiners": None, "pad_key": 1.5}, "`pad_key` must be.*1.5"),
        ({"a": 2}, {"table_options": {"b": {}}}, "table_options"),
        ({"a": 2}, {"gradient_scale": "average"}, "gradient_scale"),
    ],
)
def test_wrong_arguments(sok, dims, options, words):
    with pytest.raises(ValueError, match=words):
        sok.GroupEmbedding(dims, **options)


def of_model(shape, dtype, **options):
    return {"user": tf.keras.Input(shape, dtype=dtype, **options)}


@pytest.mark.parametrize(
    "inputs, words",
    [
        (lambda: {"usr": tf.constant([1])}, "must hold the features"),
        (lambda: [tf.constant([1])], "must be a dictionary"),
        (lambda: {"user": tf.constant([1.0])}, "integers or strings.*float32.*'user'"),
        (lambda: {"user": tf.constant([[[1]]])}, "hotness.*'user'"),
        (lambda: {"user": tf.constant([["a"]])}, "pad_key.*'user'"),
        (lambda: of_model([], "float32"), "Input.*dtype 'int64'.*float32.*'user'"),
        (lambda: of_model([2], "float32"), "Input.*dtype 'int64'.*float32.*'user'"),
        (lambda: of_model([], "bool"), "bool.*'user'"),
        (lambda: of_model([2, 3], "int64"), "batch, hotness.*'user'"),
        (lambda: of_model([2], "string"), "pad_key=0, string.*'user'"),
    ],
)
def test_wrong_inputs(sok, inputs, words):
    layer = sok.GroupEmbedding({"user": 2}, pad_key=0)
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        layer(inputs())


@pytest.mark.parametrize(
    "shape, dtype, sparse",
    [([], "int32", False), ([2], "uint64", False), ([2], "string", True), ([], "string", False)],
)
def test_right_inputs_of_a_model(sok, shape, sparse, dtype):
    found = sok.GroupEmbedding({"user": 2})(of_model(shape, dtype, sparse=sparse))
    assert tuple(found["user"].shape) == (None, 2)


def test_configuration_makes_the_same_layer(sok):
    constant = tf.keras.initializers.Constant
    option = sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(2),
        evict_option=[sok.GlobalStepEvict(5), sok.L2WeightEvict(0.1)],
        init_option=sok.InitializerOption(constant(2.0)),
    )
    layer = sok.GroupEmbedding(
        {"user": 4, "film": 4, "seen": 4},
        tables={"seen": "film"},
        combiners={"seen": "sum", "film": None},
        table_options={
            "user": {"initializer": constant(0.5), "capacity": 10},
            "film": {"dtype": tf.bfloat16, "ev_option": option},
        },
        pad_key=-1,
        name="features",
    )
    config = json.loads(json.dumps(layer.get_config()))
    again = sok.GroupEmbedding.from_config(config)
    assert json.loads(json.dumps(again.get_config())) == config
    assert config["combiners"] == {"user": "mean", "film": None, "seen": "sum"}
    unnamed = sok.GroupEmbedding([2, 2], combiners=[None, "sum"]).get_config()
    unnamed = sok.GroupEmbedding.from_config(json.loads(json.dumps(unnamed))).get_config()
    assert unnamed["combiners"] == [None, "sum"]
    user, film = again.tables["user"], again.tables["film"]
    assert user.options["capacity"] == 10
    assert (user.row_dtype, film.row_dtype) == (tf.float32, tf.bfloat16)
    assert film.options["ev_option"].filter_option == option.filter_option
    assert film.options["ev_option"].evictions == option.evictions
    np.testing.assert_array_equal(user.find([1])[0], [[0.5] * 4])


def test_a_table_has_features_of_one_kind(sok):
    """The key of "1" is not 1: silently the two would train different rows."""
    layer = sok.GroupEmbedding({"item": 2, "seen": 2}, tables={"seen": "item"})
    strings, integers = tf.constant(["1"]), tf.constant([[1, 2]])
    for order in ((strings, integers), (integers, strings)):
        layer.tables["item"].clear()
        with pytest.raises(TypeError, match="must be .* as its first one was.*feature 'seen'"):
            layer(dict(zip(("item", "seen"), order, strict=True)))
    layer.tables["item"].clear()
    layer({"item": strings, "seen": tf.strings.as_string(integers)})
    for training in (True, False):
        with pytest.raises(TypeError, match="must be strings"):
            layer({"item": integers, "seen": integers}, training=training)
    keys = sok.export(layer.tables["item"])[0]  # rows by hand: any keys
    sok.assign(layer.tables["item"], keys, tf.ones([len(keys), 2]))


def test_a_model_of_two_kinds_is_refused_when_it_is_made(sok):
    layer = sok.GroupEmbedding([2, 2], tables=["item", "item"])
    inputs = [tf.keras.Input([], dtype="string"), tf.keras.Input([3], dtype="int64")]
    with pytest.raises(TypeError, match="must be strings.*Received: integers"):
        layer(inputs)
