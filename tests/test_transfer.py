"""Transfer learning: rows from elsewhere, and layers that are frozen at first."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like import feature_column

pytestmark = pytest.mark.keras
keras = tf.keras


def layers(sok, **kwargs):
    """A layer of each door, with the function that looks ids `[batch, 1]` up."""

    def columns(layer):
        return lambda ids: layer({"ids": tf.sparse.from_dense(ids)})

    distributed = sok.DistributedEmbedding("sum", None, 2, 1, 1, name="a", **kwargs)
    all_to_all = sok.All2AllDenseEmbedding(None, 2, 1, 1, name="b", **kwargs)
    group = sok.GroupEmbedding([2], name="c", **kwargs)
    hashed = sok.HashEmbedding(2, "sum", name="d", **kwargs)
    column = feature_column.embedding_column(
        feature_column.categorical_column_with_embedding("ids", dtype=tf.int64), 2
    )
    of_columns = feature_column.DenseFeatures([column], name="e", **kwargs)
    return {
        "DistributedEmbedding": (distributed, distributed),
        "All2AllDenseEmbedding": (all_to_all, all_to_all),
        "GroupEmbedding": (group, lambda ids: group([ids])[0]),
        "HashEmbedding": (hashed, hashed),
        "DenseFeatures": (of_columns, columns(of_columns)),
    }


DOORS = (
    *("DistributedEmbedding", "All2AllDenseEmbedding", "GroupEmbedding", "HashEmbedding"),
    "DenseFeatures",
)


@pytest.mark.parametrize("door", DOORS)
def test_a_layer_made_frozen_trains_once_it_is_not(sok, door):
    layer, lookup = layers(sok, trainable=False)[door]

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def call(self, ids):
            return tf.reshape(lookup(ids), [-1, 2])

    model, ids = Model(), np.array([[1], [2]])
    before = model(ids).numpy()
    assert not layer.trainable_variables and not model.trainable_variables
    for trainable in (False, True):
        layer.trainable = trainable
        assert len(layer.trainable_variables) == len(model.trainable_variables) == trainable
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), "mse")
    model.fit(ids, before - 1, batch_size=2, verbose=0)  # the slope is 2 / 4
    np.testing.assert_allclose(model(ids, training=False), before - 0.5, atol=1e-6)


def test_weights_as_keras_layers_take_them_are_refused(sok):
    """tf_keras would take the argument and never look at it."""
    makers = [
        lambda **kwargs: sok.DistributedEmbedding("sum", None, 2, 1, 1, **kwargs),
        lambda **kwargs: sok.All2AllDenseEmbedding(None, 2, 1, 1, **kwargs),
        lambda **kwargs: sok.GroupEmbedding([2], **kwargs),
        lambda **kwargs: sok.HashEmbedding(2, **kwargs),
        lambda **kwargs: feature_column.DenseFeatures([], **kwargs),
    ]
    for make in makers:
        with pytest.raises(TypeError, match="`weights` is not.*sok.assign"):
            make(weights=[np.ones([4, 2])])


def test_a_matrix_is_not_an_initial_row(sok):
    matrix = np.arange(8, dtype=np.float32).reshape(4, 2)
    with pytest.raises(ValueError, match=r"row of 2 .*sok.assign.*shape \(4, 2\)"):
        sok.EmbeddingVariable(2, initializer=keras.initializers.Constant(matrix))
    for row in (matrix[1], matrix[1:2]):
        table = sok.EmbeddingVariable(2, initializer=keras.initializers.Constant(row))
        assert table.find([7])[0].numpy().tolist() == [[2, 3]]
