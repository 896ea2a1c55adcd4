"""What `dmp.DistributedEmbedding` refuses: the error's type, and that its text says what was
required, what was received, and of which argument or table."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp

pytestmark = pytest.mark.keras

THRESHOLD = "must be None or a number of elements, an integer >= "
WRONG_MAP = "Wrong input initializing input/map groups: `input_table_map` must hold integers in "


def two_tables():
    return [
        tf.keras.layers.Embedding(6, 3, name="users"),
        sok_like.Embedding(5, 3, combiner="sum", name="items"),
    ]


CONSTRUCTION = {
    "no such strategy": (
        {"strategy": "fast"},
        ValueError,
        [
            "Unsupported shard strategy",
            "('basic', 'memory_balanced', 'memory_optimized')",
            "Received: strategy='fast'",
        ],
    ),
    "strategy of another type": (
        {"strategy": None},
        ValueError,
        ["Unsupported shard strategy", "Received: strategy=None"],
    ),
    **{
        f"{name} {value!r}": (
            {name: value},
            ValueError,
            [f"`{name}` {THRESHOLD}{least}", f"Received: {name}={value!r}"],
        )
        for name, least, values in [
            ("column_slice_threshold", 1, (-1, 0, 1.5, True, "all")),
            ("row_slice_threshold", 0, (-1, 2.5, False)),
            ("data_parallel_threshold", 0, (-1, "none")),
        ]
        for value in values
    },
    "a threshold that has no effect": (
        {"row_slice_threshold": -3, "dp_input": False},
        ValueError,
        ["`row_slice_threshold`", "Received: row_slice_threshold=-3"],
    ),
    "another threshold that has no effect": (
        {"data_parallel_threshold": 0.5, "dp_input": False},
        ValueError,
        ["`data_parallel_threshold`", "Received: data_parallel_threshold=0.5"],
    ),
    "map to a table that does not exist": (
        {"input_table_map": [0, 2]},
        ValueError,
        [WRONG_MAP + "[0, 2)", "the number of tables", "Received: input_table_map[1]=2"],
    ),
    "map to a negative table": (
        {"input_table_map": [-1, 0]},
        ValueError,
        [WRONG_MAP, "Received: input_table_map[0]=-1"],
    ),
    "map of floats": (
        {"input_table_map": [0, 1.0]},
        ValueError,
        [WRONG_MAP, "Received: input_table_map[1]=1.0"],
    ),
    "map that is not a list": (
        {"input_table_map": 1},
        TypeError,
        ["`input_table_map` must be None or a list of integers", "Received: input_table_map=1"],
    ),
    "no embeddings": (
        {"embeddings": []},
        ValueError,
        ["`embeddings` must hold at least one embedding", "Received: an empty list"],
    ),
    "embeddings that are not a list": (
        {"embeddings": None},
        TypeError,
        ["`embeddings` must be a list of embeddings", "Received: embeddings=None"],
    ),
    "no embedding in the list": (
        {"embeddings": [*two_tables(), 7]},
        TypeError,
        ["must hold layers with get_config()", "Received: embeddings[2]=7"],
    ),
    "a layer without input_dim": (
        {"embeddings": [tf.keras.layers.Dense(3)]},
        ValueError,
        ["`input_dim` of embeddings[0] must be a positive integer", "Received: input_dim=None"],
    ),
    "a description without rows": (
        {"embeddings": [{"input_dim": 3, "output_dim": 2}, {"input_dim": 0, "output_dim": 2}]},
        ValueError,
        ["`input_dim` of embeddings[1] must be a positive integer", "Received: input_dim=0"],
    ),
    "no such combiner": (
        {"embeddings": [{"input_dim": 3, "output_dim": 2, "combiner": "max"}]},
        ValueError,
        ["`combiner` must be one of (None, 'sum', 'mean')", "Received: combiner='max'"],
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_construction(sok, name):
    arguments, kind, texts = CONSTRUCTION[name]
    with pytest.raises(kind) as caught:
        dmp.DistributedEmbedding(**{"embeddings": two_tables(), **arguments})
    assert type(caught.value) is kind
    for text in texts:
        assert text in str(caught.value)


def test_embeddings_may_come_from_a_generator(sok):
    layer = dmp.DistributedEmbedding(each for each in two_tables())
    assert [w.shape for w in layer.get_weights()] == [(6, 3), (5, 3)]


PLANS = {
    "no ranks": ({"world_size": 0}, ["`world_size` must be a positive integer", "world_size=0"]),
    "ranks as a text": ({"world_size": "2"}, ["`world_size` must be", "world_size='2'"]),
    "ranks left without a table": (
        {"world_size": 4, "column_slice_threshold": 300},
        [
            "Not enough table after slicing to run on all worker. Try decrease "
            "column_slice_threshold or decrease worker count",
            "Received: column_slice_threshold=300, world_size=4",
            "leaves ranks [3] without a table",
        ],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_planning_for_more_ranks(name):
    arguments, texts = PLANS[name]
    tables = [{"input_dim": 100, "output_dim": 4}, {"input_dim": 10, "output_dim": 4}]
    with pytest.raises(ValueError) as caught:
        dmp.DistEmbeddingStrategy(tables, **arguments)
    for text in texts:
        assert text in str(caught.value)


ONE, SOME = tf.constant([[1]]), tf.constant([[1, 2]])
INTEGERS = "Ids of table 'users' must be integers"
CALLS = {
    "too few inputs": ([ONE], {}, ValueError, ["Expect 2 inputs, got 1", "a list of all inputs"]),
    "too many inputs": ([ONE, SOME, ONE], {}, ValueError, ["Expect 2 inputs, got 3"]),
    "one tensor for all": (ONE, {}, ValueError, ["Expect 2 inputs, got 1"]),
    "fewer inputs than in the map": (
        [ONE, SOME],
        {"input_table_map": [0, 1, 0]},
        ValueError,
        ["Expect 3 inputs, got 2"],
    ),
    "too few model-parallel inputs": (
        [ONE],
        {"dp_input": False},
        ValueError,
        ["Expect 2 inputs, got 1", "the inputs of rank 0"],
    ),
    "floats": ([tf.constant([[1.0]]), SOME], {}, TypeError, [INTEGERS, "Received: float32"]),
    "booleans": ([tf.constant([[True]]), SOME], {}, TypeError, [INTEGERS, "Received: bool"]),
    "texts": ([tf.constant([["a"]]), SOME], {}, TypeError, [INTEGERS, "Received: string"]),
    "no tensor": (
        [None, SOME],
        {},
        TypeError,
        ["`inputs` must be a list of integer tensors", "Received: inputs[0]=None"],
    ),
    "a dictionary": (
        {"a": ONE, "b": SOME},
        {},
        TypeError,
        ["`inputs` must be a list of integer tensors", "Received: inputs[0]={'a': "],
    ),
    "1-D ids for a combiner": (
        [ONE, tf.constant([1])],
        {},
        ValueError,
        ["1-D ids with a combiner are ambiguous", "Received: shape (1,) (table 'items')"],
    ),
    "nested ragged ids": (
        [ONE, tf.ragged.constant([[[1]]], dtype=tf.int64)],
        {},
        ValueError,
        ["A RaggedTensor of ids must be 2-D, [batch, None]", "(table 'items')"],
    ),
    "3-D sparse ids": (
        [ONE, tf.SparseTensor([[0, 0, 0]], [1], [1, 1, 1])],
        {},
        ValueError,
        ["A SparseTensor of ids must be 2-D", "Received: shape (1, 1, 1) (table 'items')"],
    ),
    "an id behind the last row": (
        [tf.constant([[6]]), SOME],
        {},
        tf.errors.InvalidArgumentError,
        ["Ids of table 'users' must be in [0, input_dim)", "id 6 with input_dim 6"],
    ),
    "a negative id": (
        [ONE, tf.constant([[-1, 2]])],
        {},
        tf.errors.InvalidArgumentError,
        ["Ids of table 'items' must be in [0, input_dim)", "id -1 with input_dim 5"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(sok, name):
    inputs, arguments, kind, texts = CALLS[name]
    layer = dmp.DistributedEmbedding(two_tables(), **arguments)
    with pytest.raises(kind) as caught:
        layer(inputs)
    for text in texts:
        assert text in str(caught.value)
    layer([ONE, SOME, ONE][: len(layer.strategy.input_table_map)])  # and can go on


def test_batches_of_inputs_may_differ(sok):
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    tables = [np.arange(18.0).reshape(6, 3), np.arange(15.0).reshape(5, 3)]
    layer.set_weights(tables)
    users, items = layer([tf.constant([[1], [4], [0]]), SOME])
    np.testing.assert_array_equal(users, tables[0][[[1], [4], [0]]])
    np.testing.assert_array_equal(items, tables[1][[1]] + tables[1][[2]])


USERS, ITEMS = np.ones([6, 3]), np.ones([5, 3])
WEIGHTS = {
    "too few": ([USERS], {}, ["`weights` must hold 2 tables, one per embedding", "Received: 1"]),
    "too many": ([USERS, ITEMS, ITEMS], {}, ["`weights` must hold 2 tables", "Received: 3"]),
    "none": (None, {}, ["`weights` must hold 2 tables", "Received: None"]),
    "a path alone": ("users.npy", {}, ["`weights` must hold 2 tables", "Received: 'users.npy'"]),
    "another width": (
        [USERS, np.ones([5, 2])],
        {},
        ["`weights[1]` must have the shape (5, 3)", "Received: shape (5, 2)"],
    ),
    "other tables' order": (
        [ITEMS, USERS],
        {},
        ["`weights[0]` must have the shape (6, 3)", "Received: shape (5, 3)"],
    ),
    "flat": (
        [USERS, np.ones(15)],
        {},
        ["`weights[1]` must have the shape (5, 3)", "Received: shape (15,)"],
    ),
    "texts": (
        [USERS, np.full([5, 3], "a")],
        {},
        ["`weights[1]` must hold real numbers", "Received: <U1"],
    ),
    "complex": (
        [USERS, ITEMS * 1j],
        {},
        ["`weights[1]` must hold real numbers", "Received: complex128"],
    ),
    "a file that does not exist": (
        [USERS, "missing.npy"],
        {},
        ["`weights[1]` must be an array or the path of an .npy file", "Received: 'missing.npy'"],
    ),
    "no elements at a time": (
        [USERS, ITEMS],
        {"chunk": 0},
        ["`chunk` must be a positive integer", "Received: chunk=0"],
    ),
    "half an element": (
        [USERS, ITEMS],
        {"chunk": 0.5},
        ["`chunk` must be a positive integer", "Received: chunk=0.5"],
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_refused_before_any_is_set(sok, name):
    weights, arguments, texts = WEIGHTS[name]
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    before = layer.get_weights()
    with pytest.raises(ValueError) as caught:
        layer.set_weights(weights, **arguments)
    for text in texts:
        assert text in str(caught.value)
    for a, b in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_file_of_another_kind_is_named(sok, tmp_path):
    path = tmp_path / "rows.npy"
    path.write_text("no array")
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    with pytest.raises(ValueError, match=r"`weights\[1\]` must be an array or .*rows.npy"):
        layer.set_weights([USERS, path])


@pytest.mark.parametrize("dtype", [np.float16, np.int64, bool, tf.bfloat16.as_numpy_dtype])
def test_weights_of_any_real_dtype(sok, dtype):
    layer = dmp.DistributedEmbedding(two_tables())
    layer.build(None)
    layer.set_weights([USERS.astype(dtype), ITEMS.astype(dtype)])
    for weight in layer.get_weights():
        np.testing.assert_array_equal(weight, np.ones_like(weight))


def built():
    layer = tf.keras.layers.Embedding(6, 3, name="users")
    layer(tf.constant([[1]]))
    return layer


def stock_with_weights():
    return tf.keras.layers.Embedding(6, 3, weights=[np.ones((6, 3))], name="users")


def own_with_weights():
    return sok_like.Embedding(6, 3, weights=[np.ones((6, 3))], name="users")


@pytest.mark.parametrize("make", [built, stock_with_weights, own_with_weights])
def test_weights_of_embeddings_that_would_be_lost(make):
    with pytest.raises(ValueError, match="not built.*set_weights.*embeddings.1.: Embedding 'users"):
        dmp.DistributedEmbedding([sok_like.Embedding(5, 3), make()])


def test_regularizer_of_outputs_that_would_not_be_made():
    layer = tf.keras.layers.Embedding(6, 3, activity_regularizer="l2", name="users")
    with pytest.raises(ValueError, match="`activity_regularizer`.*embeddings.0.: Embedding 'users"):
        dmp.DistributedEmbedding([layer])


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
