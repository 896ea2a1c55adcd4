"""`dmp.DistributedEmbedding` on one process: configuration, Keras models, initial rows."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm, initialize

pytestmark = pytest.mark.keras


def two_tables():
    return [tf.keras.layers.Embedding(6, 3), sok_like.Embedding(5, 3, combiner="sum")]


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
    for a, b in zip(layer(ids), again(ids), strict=True):
        np.testing.assert_array_equal(a, b)


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


def test_each_table_has_its_own_rows():
    rows = dmp.ConcatInitializer(Shape(), [2, 3])((5, 4), dtype="float64")
    assert rows.dtype == tf.float64
    np.testing.assert_array_equal(rows[:, 0], [204, 204, 304, 304, 304])
    initializer = dmp.ConcatInitializer(["ones", Shape()], [1, 2])
    np.testing.assert_array_equal(initializer((3, 2), dtype="float32")[:, 1], [1, 202, 202])


def test_round_trip():
    initializer = dmp.ConcatInitializer(["ones", "zeros"], [1, 2])
    again = tf.keras.initializers.deserialize(tf.keras.initializers.serialize(initializer))
    assert isinstance(again, dmp.ConcatInitializer)
    np.testing.assert_array_equal(again((3, 1), dtype="float32"), [[1], [0], [0]])


def test_refused():
    for arguments, message in (
        ((["ones"], [1, 2]), "1 initializers for 2 sizes"),
        (("ones", []), r"`sizes` must be positive integers. Received: sizes=\[\]"),
        (("ones", [2, 0]), r"Received: sizes=\[2, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dmp.ConcatInitializer(*arguments)
    with pytest.raises(ValueError, match=r"sum\(sizes\)=3. Received: shape=\(4, 1\)"):
        dmp.ConcatInitializer("ones", [1, 2])((4, 1))
