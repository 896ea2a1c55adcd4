"""A hash table, a dense table over ranks and replicated weights under one optimizer."""

import numpy as np
import pytest

from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.keras]


def train_all_kinds():
    import tensorflow as tf

    import sok_like as sok
    from sok_like import dist_model_parallel as dmp
    from sok_like.runtime import comm

    sok.Init(global_batch_size=4, seed=5)
    rank, world_size = comm.current().rank, comm.current().world_size
    hashed = sok.All2AllDenseEmbedding(
        None, 2, 1, 1, dynamic_input=True, gradient_scale="mean", embedding_initializer="zeros"
    )
    tables = [tf.keras.layers.Embedding(4, 2), tf.keras.layers.Embedding(4, 2)]
    dense = dmp.DistributedEmbedding(tables)
    dense.set_weights([np.zeros([4, 2]), np.zeros([4, 2])])
    weights = tf.Variable([0.0])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    ids = tf.constant([0, 1, 2, 3], tf.int64)[rank::world_size]  # every id once over all ranks
    factor = 4.0 / world_size  # the mean over ranks of a sum over a rank's share
    variables = [*hashed.trainable_variables, *dense.trainable_variables, weights]
    with tf.GradientTape() as tape:
        first, second = dense([ids, ids])  # unlike gradients: averaged, the tables would mix
        outputs = [hashed(ids), first, 3.0 * second]
        loss = sum(tf.reduce_sum(output) for output in outputs) * factor
        loss += weights[0] * float(rank + 1)
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    rows = hashed(tf.constant([0, 1, 2, 3], tf.int64), training=False).numpy()
    return {"hashed": rows, "dense": dense.get_weights(all_ranks=True), "weights": weights.numpy()}


def test_each_kind_moves_by_its_own_gradient():
    results = run_ranks("tests.optimizers.test_local_variables:train_all_kinds", 2)
    # Loss on a rank: 2 x the sum over its rows; over two ranks a row's mean gradient is 1.
    for result in results:
        np.testing.assert_allclose(result["hashed"], -np.ones([4, 2]), rtol=1e-6)
        for table, factor in zip(result["dense"], (1.0, 3.0), strict=True):
            np.testing.assert_allclose(table, np.full([4, 2], -factor), rtol=1e-6)
        np.testing.assert_allclose(result["weights"], [-1.5], rtol=1e-6)
