"""A hash table, a dense table over ranks and replicated weights under one optimizer."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp


@pytest.mark.keras
def test_each_kind_moves_by_its_own_gradient(on_threads):
    def check():
        hashed = sok.All2AllDenseEmbedding(
            None, 2, 1, 1, dynamic_input=True, gradient_scale="mean", embedding_initializer="zeros"
        )
        dense = dmp.DistributedEmbedding([tf.keras.layers.Embedding(4, 2) for _ in range(2)])
        dense.set_weights([np.zeros([4, 2]), np.zeros([4, 2])])
        weights = tf.Variable([0.0])
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        ids = tf.range(4, dtype=tf.int64)[sok.rank() :: 2]  # every id once over all ranks
        variables = [*hashed.trainable_variables, *dense.trainable_variables, weights]
        with tf.GradientTape() as tape:
            first, second = dense([ids, ids])  # unlike gradients: averaged, the tables would mix
            outputs = [hashed(ids), first, 3.0 * second]
            # The mean over ranks of a sum over a rank's share.
            loss = sum(tf.reduce_sum(output) for output in outputs) * 2.0
            loss += weights[0] * float(sok.rank() + 1)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        rows = hashed(tf.range(4, dtype=tf.int64), training=False)
        # Loss on a rank: 2 x the sum over its rows; over two ranks a row's mean gradient is 1.
        np.testing.assert_allclose(rows, -np.ones([4, 2]), rtol=1e-6)
        for table, factor in zip(dense.get_weights(all_ranks=True), (1.0, 3.0), strict=True):
            np.testing.assert_allclose(table, np.full([4, 2], -factor), rtol=1e-6)
        np.testing.assert_allclose(weights, [-1.5], rtol=1e-6)

    on_threads(2, check)
