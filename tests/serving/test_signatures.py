"""Inputs and outputs of each kind: a served signature computes what the live model does."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.serving import OneTable

pytestmark = pytest.mark.keras
DIM = 4
KEYS = tf.constant([1, 2, 2, 9], tf.int64)  # 9 has no row of its own
IDS = tf.RaggedTensorSpec([None, None], tf.int64)
RAGGED = tf.RaggedTensor.from_row_splits(KEYS, [0, 1, 1, 4])
DEEP = tf.RaggedTensor.from_nested_row_splits(KEYS, [[0, 2, 2, 3], [0, 1, 3, 4]])
SPARSE = RAGGED.to_sparse()
Pair = collections.namedtuple("Pair", ["keys", "scales"])


def rows(table, keys):
    """Rows in the place of keys."""
    if tf.is_tensor(keys) and not isinstance(keys, tf.RaggedTensor | tf.SparseTensor):
        return tf.nn.embedding_lookup(table, keys)
    return tf.ragged.map_flat_values(lambda flat: tf.nn.embedding_lookup(table, flat), keys)


def wide(table, keys):
    """Sums of rows, and a product that needs the static width of a sparse input."""
    return tf.nn.embedding_lookup_sparse(table, keys, None, combiner="sum"), tf.sparse.to_dense(
        keys
    ) @ tf.ones([keys.shape[1], 1], tf.int64)


def structure(table, given):
    return {
        "nested": {"deep": [rows(table, given["b"][1][0]), given["b"][0]]},
        "number": tf.constant(3),
    }


# What the model computes, its specs, its arguments, and the names of inputs and of outputs.
CASES = {
    "dense": (rows, [tf.TensorSpec([None], tf.int64)], [KEYS], "keys", "output_0"),
    "scalar": (
        lambda table, key: tf.reduce_sum(rows(table, key)),
        *([tf.TensorSpec([], tf.int64, "key")], [KEYS[0]], "key", "output_0"),
    ),
    "ragged": (
        *(rows, [IDS], [RAGGED], "keys_values keys_row_splits"),
        "output_0_values output_0_row_splits",
    ),
    "int32_splits": (
        rows,
        [tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int32)],
        [RAGGED.with_row_splits_dtype(tf.int32)],
        *("keys_values keys_row_splits", "output_0_values output_0_row_splits"),
    ),
    "ragged_twice": (
        *(rows, [tf.RaggedTensorSpec([None, None, None], tf.int64)], [DEEP]),
        "keys_values keys_row_splits keys_row_splits_1",
        "output_0_values output_0_row_splits output_0_row_splits_1",
    ),
    "stacked": (
        lambda table, keys: {"both": tf.stack([rows(table, keys), -rows(table, keys)])},
        *([IDS], [RAGGED], "keys_values keys_row_splits"),
        "both_values both_row_splits both_row_splits_1",
    ),
    "sparse": (
        *(wide, [tf.SparseTensorSpec([None, 3], tf.int64)], [SPARSE]),
        *("keys_indices keys_values keys_dense_shape", "output_0 output_1"),
    ),
    "sparse_of_any_rank": (
        lambda table, keys: {"found": keys.with_values(rows(table, keys.values)[:, 0])},
        *([tf.SparseTensorSpec(None, tf.int64)], [SPARSE]),
        "keys_indices keys_values keys_dense_shape",
        "found_indices found_values found_dense_shape",
    ),
    "structure": (
        structure,
        [{"a": tf.TensorSpec([None], tf.int64), "b": [tf.TensorSpec([None], tf.string), (IDS,)]}],
        [{"a": KEYS, "b": [tf.constant(["é", ""]), (RAGGED,)]}],
        "a b_0 b_1_0_values b_1_0_row_splits",
        "nested_deep_0_values nested_deep_0_row_splits nested_deep_1 number",
    ),
    "tuple": (
        lambda table, pair: Pair(rows(table, pair.keys), pair.scales[:, tf.newaxis]),
        [Pair(tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float32))],
        *([Pair(KEYS, tf.range(4.0))], "args_0 args_1", "output_0 output_1"),
    ),
    "bfloat16": (
        lambda table, keys, more: [tf.cast(rows(table, keys), tf.bfloat16) + more, more[0, 0]],
        [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 1], tf.bfloat16, "more")],
        *([KEYS, tf.ones([4, 1], tf.bfloat16)], "keys more", "output_0 output_1"),
    ),
}


@pytest.fixture
def model(sok):
    """A model of one table."""
    table = sok.EmbeddingVariable(DIM, name="served")
    sok.assign(table, [1, 2, 3], np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM))
    return OneTable(table)


def function_of(model, compute, specs):
    """A function with a name for its first input."""

    def call(keys, *rest, scale=2):
        return compute(model.table, keys, *rest)

    return tf.function(call, input_signature=specs)


def served(sok, model, path, **options):
    """The signatures of an export."""
    sok.export_saved_model(model, path, **options)
    return tf.saved_model.load(str(path)).signatures


def named(names, values):
    flat = tf.nest.flatten(values, expand_composites=True)
    return dict(zip(names.split(), flat, strict=True))


WRONG = {  # an input that does not fit the others, and the error
    "sparse": ("keys_dense_shape", [3, 5], "keys_dense_shape.*must fit.*None, 3"),
    "ragged_twice": ("keys_row_splits_1", [0, 1, 3, 9], "partition"),
}


@pytest.mark.parametrize("refreshable", [False, True])
def test_a_signature_computes_what_the_model_does(sok, model, tmp_path, refreshable):
    # How rows are served has nothing to do with the case.
    cases = {case: CASES[case] for case in list(CASES)[refreshable::2]}
    functions = {case: function_of(model, *cases[case][:2]) for case in cases}
    signatures = served(sok, model, tmp_path, signatures=functions, refreshable=refreshable)
    for case, (_, _, arguments, inputs, outputs) in cases.items():
        expected = named(outputs, functions[case](*arguments))
        found = signatures[case](**named(inputs, arguments))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name].numpy(), value.numpy(), f"{case} {name}")
        if case in WRONG:  # a server checks what a client sends
            name, wrong, words = WRONG[case]
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                signatures[case](**{**named(inputs, arguments), name: tf.constant(wrong, tf.int64)})


SAME_NAMES = {
    "a_values": lambda table, keys: {"a": rows(table, keys), "a_values": keys.values},
    "a_b": lambda table, keys: {"a": {"b": keys.values}, "a_b": rows(table, keys).values},
}


@pytest.mark.parametrize("name", SAME_NAMES)
def test_outputs_of_one_name_raise(sok, model, tmp_path, name):
    functions = {"names": function_of(model, SAME_NAMES[name], [IDS])}
    with pytest.raises(ValueError, match=f"Outputs of a signature must have different.*'{name}'"):
        sok.export_saved_model(model, tmp_path / "model", signatures=functions)


def test_an_argument_with_a_default_takes_no_name_away(sok, tmp_path):
    class Scores(OneTable):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def __call__(self, keys, training=False):
            return rows(self.table, keys)

    model = Scores(sok.EmbeddingVariable(DIM, name="served"))
    serve = served(sok, model, tmp_path / "model")["serving_default"]
    assert list(serve.structured_input_signature[1]) == ["keys"]


def functional(sok, kind):
    """A Keras model with an `Input` of a kind, and a batch for it."""
    is_ragged = kind == "ragged"
    options = {"ragged": True} if is_ragged else {"sparse": True}
    keys = tf.keras.Input([None if is_ragged else 3], dtype="int64", name="keys", **options)
    if kind == "columns":
        column = sok.feature_column.categorical_column_with_embedding("keys", dtype=tf.int64)
        layer = sok.feature_column.DenseFeatures([sok.feature_column.embedding_column(column, DIM)])
    else:
        layer = sok.GroupEmbedding({"keys": DIM})
    return tf.keras.Model({"keys": keys}, layer({"keys": keys})), RAGGED if is_ragged else SPARSE


@pytest.mark.parametrize("kind", ["sparse", "ragged", "columns"])
def test_inputs_of_keras(sok, tmp_path, kind):
    model, batch = functional(sok, kind)
    expected = tf.nest.flatten(model({"keys": batch}, training=True))[0]
    assert np.abs(expected).max() > 0
    inputs = CASES["ragged" if kind == "ragged" else "sparse"][3]
    serve = served(sok, model, tmp_path / "model")["serving_default"]
    (found,) = serve(**named(inputs, batch)).values()
    np.testing.assert_array_equal(found, expected)
