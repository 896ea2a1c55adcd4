"""`dmp.DistributedEmbedding` on one process: configuration, initial rows, and what it refuses."""

import re

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm, initialize
from tests.dist_model_parallel.cases import assert_same

pytestmark = pytest.mark.keras


def two_tables():
    return [
        tf.keras.layers.Embedding(6, 3, name="users"),
        sok_like.Embedding(5, 3, combiner="sum", name="items"),
    ]


def test_without_init():
    initialize.reset()
    layer = dmp.DistributedEmbedding(two_tables())
    assert comm.is_initialized()
    a, b = layer([tf.constant([[1]]), tf.constant([[1, 2]])])
    assert a.shape == (1, 1, 3) and b.shape == (1, 3)
    sok_like.Init(global_batch_size=4)
    initialize.reset()


def test_configuration(sok):
    layer = dmp.DistributedEmbedding(two_tables(), "memory_balanced", input_table_map=[0, 1, 0])
    again = dmp.DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    ids = [tf.constant([[1]]), tf.constant([[1, 2]]), tf.constant([[5]])]
    layer(ids)
    again.set_weights(layer.get_weights())
    assert_same(layer(ids), again(ids))


def test_compute_dtype(sok):
    layer = dmp.DistributedEmbedding(two_tables(), dtype="mixed_bfloat16")
    outputs = layer([tf.constant([[1]]), tf.constant([[1, 2]])])
    assert [o.dtype for o in outputs] == [tf.bfloat16] * 2
    assert all(v.dtype in ("float32", tf.float32) for v in layer.weights)


def test_in_a_functional_model(sok):
    """It makes layers like those given, which stay as they are."""
    inputs = [tf.keras.Input([1], dtype="int64"), tf.keras.Input([2], dtype="int32")]
    given = two_tables()
    layer = dmp.DistributedEmbedding(given)
    a, b = layer(inputs)
    assert tuple(a.shape) == (None, 1, 3) and tuple(b.shape) == (None, 3)
    assert not any(each.built for each in given) and len(layer.weights) == 2
    a, b = tf.keras.Model(inputs, [a, b])([tf.constant([[1], [2]]), tf.constant([[1, 2], [0, 0]])])
    assert a.shape == (2, 1, 3) and b.shape == (2, 3)


def test_initial_rows_come_from_each_tables_own_initializer(sok):
    tables = [
        tf.keras.layers.Embedding(4, 2, embeddings_initializer=tf.keras.initializers.Constant(v))
        for v in (1.0, 2.0)
    ]
    layer = dmp.DistributedEmbedding(tables)
    one, two = layer.get_weights()
    assert len(layer.weights) == 1  # joined
    assert (one == 1).all() and (two == 2).all()


class Shape(tf.keras.initializers.Initializer):
    """Rows whose values show the requested shape."""

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.fill(shape, tf.cast(100 * shape[0] + shape[1], dtype))


def test_concat_initializer():
    """Each table has rows of its own."""
    rows = dmp.ConcatInitializer(Shape(), [2, 3])((5, 4), dtype="float64")
    assert rows.dtype == tf.float64
    np.testing.assert_array_equal(rows[:, 0], [204, 204, 304, 304, 304])
    initializer = dmp.ConcatInitializer(["ones", Shape()], [1, 2])
    np.testing.assert_array_equal(initializer((3, 2), dtype="float32")[:, 1], [1, 202, 202])
    initializer = dmp.ConcatInitializer(["ones", "zeros"], [1, 2])
    again = tf.keras.initializers.deserialize(tf.keras.initializers.serialize(initializer))
    assert isinstance(again, dmp.ConcatInitializer)
    np.testing.assert_array_equal(again((3, 1), dtype="float32"), [[1], [0], [0]])
    for arguments, message in (
        ((["ones"], [1, 2]), "1 initializers for 2 sizes"),
        (("ones", []), r"`sizes` must be positive integers. Received: sizes=\[\]"),
        (("ones", [2, 0]), r"Received: sizes=\[2, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dmp.ConcatInitializer(*arguments)
    with pytest.raises(ValueError, match=r"sum\(sizes\)=3. Received: shape=\(4, 1\)"):
        again((4, 1))


def raises(error, words):
    """Words as they are, `...` between them."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words.split("..."))))


POSITIVE = "must be a positive integer"
MAX = {"input_dim": 3, "output_dim": 2, "combiner": "max"}


@pytest.mark.parametrize(
    "arguments, error, words",
    [  # more values in tests/planner/test_strategy.py
        ({"strategy": "fast"}, ValueError, "Unsupported shard strategy...strategy='fast'"),
        ({"column_slice_threshold": 0}, ValueError, "an integer >= 1...column_slice_threshold=0"),
        ({"row_slice_threshold": -1}, ValueError, "an integer >= 0...row_slice_threshold=-1"),
        ({"data_parallel_threshold": -1}, ValueError, "data_parallel_threshold=-1"),
        # Without effect they are wrong as well.
        ({"row_slice_threshold": -3, "dp_input": False}, ValueError, "row_slice_threshold=-3"),
        ({"data_parallel_threshold": 0.5, "dp_input": False}, ValueError, "parallel_threshold=0.5"),
        ({"input_table_map": [0, 2]}, ValueError, "[0, 2), the number of tables...table_map[1]=2"),
        ({"input_table_map": 1}, TypeError, "must be None or a list of integers...Received: "),
        ({"embeddings": []}, ValueError, "must hold at least one embedding...an empty list"),
        ({"embeddings": None}, TypeError, "must be a list of embeddings...embeddings=None"),
        ({"embeddings": [7]}, TypeError, "hold layers with get_config()...embeddings[0]=7"),
        ({"embeddings": [tf.keras.layers.Dense(3)]}, ValueError, "`input_dim` of embeddings[0]"),
        ({"embeddings": [MAX]}, ValueError, "one of (None, 'sum', 'mean')...combiner='max'"),
    ],
)
def test_construction(sok, arguments, error, words):
    with raises(error, words):
        dmp.DistributedEmbedding(**{"embeddings": two_tables(), **arguments})


ONE, SOME = tf.constant([[1]]), tf.constant([[1, 2]])
TENSORS = "`inputs` must be a list of integer tensors...Received: inputs[0]="
OUTSIDE = tf.errors.InvalidArgumentError


@pytest.mark.parametrize(
    "inputs, arguments, error, words",
    [
        ([ONE], {}, ValueError, "Expect 2 inputs, got 1...a list of all inputs"),
        ([ONE, SOME, ONE], {}, ValueError, "Expect 2 inputs, got 3"),
        (ONE, {}, ValueError, "Expect 2 inputs, got 1"),
        ([ONE, SOME], {"input_table_map": [0, 1, 0]}, ValueError, "Expect 3 inputs, got 2"),
        ([ONE], {"dp_input": False}, ValueError, "Expect 2 inputs, got 1...the inputs of rank 0"),
        ([tf.constant([[1.0]]), SOME], {}, TypeError, "Ids of table 'users' must be...float32"),
        ([None, SOME], {}, TypeError, TENSORS + "None"),
        ({"a": ONE, "b": SOME}, {}, TypeError, TENSORS + "{'a': "),
        ([ONE, tf.constant([1])], {}, ValueError, "ambiguous...shape (1,) (table 'items')"),
        ([tf.constant([[6]]), SOME], {}, OUTSIDE, "'users' must be in [0, input_dim)...id 6 with"),
        ([ONE, tf.constant([[-1, 2]])], {}, OUTSIDE, "'items' must be in...id -1 with input_dim 5"),
    ],
)
def test_call(sok, inputs, arguments, error, words):
    layer = dmp.DistributedEmbedding(two_tables(), **arguments)
    with raises(error, words):
        layer(inputs)
    layer([ONE, SOME, ONE][: len(layer.strategy.input_table_map)])  # and can go on


def test_batches_of_inputs_may_differ(sok):
    layer = dmp.DistributedEmbedding(each for each in two_tables())
    layer.build(None)
    tables = [np.arange(18.0).reshape(6, 3), np.arange(15.0).reshape(5, 3)]
    layer.set_weights(tables)
    users, items = layer([tf.constant([[1], [4], [0]]), SOME])
    np.testing.assert_array_equal(users, tables[0][[[1], [4], [0]]])
    np.testing.assert_array_equal(items, tables[1][[1]] + tables[1][[2]])


USERS, ITEMS = np.ones([6, 3]), np.ones([5, 3])
OF_TWO = "`weights` must hold 2 tables, one per embedding...Received: "
OF_ITEMS = "`weights[1]` must have the shape (5, 3)...Received: shape "


@pytest.mark.parametrize(
    "weights, arguments, words",
    [
        ([USERS], {}, OF_TWO + "1"),
        ([USERS, ITEMS, ITEMS], {}, OF_TWO + "3"),
        (None, {}, OF_TWO + "None"),
        ("users.npy", {}, OF_TWO + "'users.npy'"),
        ([USERS, np.ones([5, 2])], {}, OF_ITEMS + "(5, 2)"),
        ([ITEMS, USERS], {}, "`weights[0]` must have the shape (6, 3)...Received: shape (5, 3)"),
        ([USERS, np.ones(15)], {}, OF_ITEMS + "(15,)"),
        ([USERS, np.full([5, 3], "a")], {}, "`weights[1]` must hold real numbers...<U1"),
        ([USERS, ITEMS * 1j], {}, "`weights[1]` must hold real numbers...Received: complex128"),
        ([USERS, "missing.npy"], {}, "`weights[1]` must be an array or the path of an .npy file"),
        ([USERS, __file__], {}, "`weights[1]` must be an array or...test_one_process.py"),
        ([USERS, ITEMS], {"chunk": 0}, f"`chunk` {POSITIVE}...Received: chunk=0"),
        ([USERS, ITEMS], {"chunk": 0.5}, f"`chunk` {POSITIVE}...Received: chunk=0.5"),
    ],
)
def test_weights_are_refused_before_any_is_set(sok, weights, arguments, words):
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    before = layer.get_weights()
    with raises(ValueError, words):
        layer.set_weights(weights, **arguments)
    assert_same(layer.get_weights(), before)


@pytest.mark.parametrize("dtype", [np.float16, np.int64, bool, tf.bfloat16.as_numpy_dtype])
def test_weights_of_any_real_dtype(sok, dtype):
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    layer.set_weights([USERS.astype(dtype), ITEMS.astype(dtype)])
    assert_same(layer.get_weights(), [USERS, ITEMS])


def test_what_given_embeddings_have_and_would_be_lost():
    built, stock = two_tables()[0], tf.keras.layers.Embedding
    built(tf.constant([[1]]))
    given = {"weights": [np.ones((6, 3))], "name": "users"}
    lost = "not built.*set_weights.*embeddings.1.: Embedding 'users"
    for layer, words in (
        *(
            (each, lost)
            for each in (built, stock(6, 3, **given), sok_like.Embedding(6, 3, **given))
        ),
        (stock(6, 3, activity_regularizer="l2", name="users"), "`activity_regularizer`.*'users"),
    ):
        with pytest.raises(ValueError, match=words):
            dmp.DistributedEmbedding([sok_like.Embedding(5, 3), layer])


class Pooled(tf.keras.layers.Layer):
    """A user's layer that has a mask and a combiner."""

    def get_config(self):
        own = {"input_dim": 6, "output_dim": 3, "combiner": "sum", "mask_zero": True}
        return {**super().get_config(), **own}


def test_masks_of_outputs_without_positions():
    with pytest.raises(ValueError, match="`mask_zero` must be False with a combiner.*'pooled'"):
        dmp.DistributedEmbedding([Pooled(name="pooled")])
    with pytest.raises(ValueError, match="`mask_zero` must be False with a combiner.*True"):
        sok_like.Embedding(6, 3, combiner="mean", mask_zero=True)
