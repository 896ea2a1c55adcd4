"""`dmp.DistributedEmbedding` on one process: construction, configuration, Keras models."""

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


def test_layer_with_more_than_a_table(sok):
    @tf.keras.utils.register_keras_serializable("tests")
    class Biased(tf.keras.layers.Layer):
        def __init__(self, input_dim, output_dim, **kwargs):
            super().__init__(**kwargs)
            self.input_dim, self.output_dim = input_dim, output_dim

        def build(self, input_shape=None):
            self.add_weight(name="table", shape=(self.input_dim, self.output_dim))
            self.add_weight(name="bias", shape=(self.output_dim,))

        def get_config(self):
            sizes = {"input_dim": self.input_dim, "output_dim": self.output_dim}
            return {**super().get_config(), **sizes}

    layer = dmp.DistributedEmbedding([Biased(4, 2)])
    with pytest.raises(ValueError, match="must have one weight, its table. Received: 2 weights"):
        layer.set_weights([np.zeros([4, 2])])


def test_the_layers_given_are_not_used(sok):
    given = two_tables()
    layer = dmp.DistributedEmbedding(given)
    layer([tf.constant([[1]]), tf.constant([[1, 2]])])
    assert not any(each.built for each in given)
    assert len(layer.weights) == 2


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
    inputs = [tf.keras.Input([1], dtype="int64"), tf.keras.Input([2], dtype="int32")]
    a, b = dmp.DistributedEmbedding(two_tables())(inputs)
    assert tuple(a.shape) == (None, 1, 3) and tuple(b.shape) == (None, 3)
    model = tf.keras.Model(inputs, [a, b])
    a, b = model([tf.constant([[1], [2]]), tf.constant([[1, 2], [0, 0]])])
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
