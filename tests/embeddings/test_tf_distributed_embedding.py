"""`TFDistributedEmbedding`: a lookup in an ordinary variable."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training import train_step

pytestmark = pytest.mark.keras

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)
KEYS = np.array([[1, 2], [2, 9]])


@pytest.fixture
def cls():
    from sok_like.embeddings.tf_distributed_embedding import TFDistributedEmbedding

    return TFDistributedEmbedding


@pytest.mark.parametrize("in_strategy", [False, True])
def test_rows_and_gradient_are_those_of_a_dense_table(cls, in_strategy):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    scope = strategy.scope() if in_strategy else tf.name_scope("none")
    with scope:
        layer = cls(vocabulary_size=10, embedding_vec_size=4, initializer=ROWS)
        optimizer = tf.keras.optimizers.SGD(0.5)
    assert len(layer.trainable_variables) == 1
    assert layer.embedding_weights.shape == (10, 4)

    @tf.function
    def step(keys):
        return train_step(
            optimizer, layer.trainable_variables, lambda: tf.reduce_sum(layer(keys) ** 2)
        )

    loss = strategy.run(step, args=(tf.constant(KEYS),)) if in_strategy else step(tf.constant(KEYS))
    np.testing.assert_allclose(loss, (ROWS[KEYS] ** 2).sum())
    expected = ROWS.copy()
    np.subtract.at(expected, KEYS.ravel(), 0.5 * 2 * ROWS[KEYS.ravel()])
    np.testing.assert_allclose(np.asarray(layer.embedding_weights), expected)
    again = cls.from_config(layer.get_config())
    assert again(KEYS).shape == (2, 2, 4)


def test_rows_of_another_shape(cls):
    with pytest.raises(ValueError, match=r"shape \[.*\] = \[10, 4\]. Received: .* \[4, 10\]"):
        cls(10, 4, initializer=ROWS.T)
