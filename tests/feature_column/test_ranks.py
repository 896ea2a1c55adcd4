"""A layer of columns on 2 ranks against stock columns in one process."""

import numpy as np
import tensorflow as tf

import sok_like as sok
from tests.feature_column import cases


def test_a_step_equals_that_of_stock_columns(on_threads):
    """Each rank has half of the samples; rows of keys go to their owners."""
    right, factors, gradients = cases.expected()

    def check():
        fc, mine = sok.feature_column, slice(2 * sok.rank(), 2 * sok.rank() + 2)
        layer = cases.filled(fc.DenseFeatures(cases.group_columns(fc), name="checked"))
        features = {name: value[mine] for name, value in cases.tensors("ragged").items()}
        with tf.GradientTape() as tape:
            output = layer(features, training=True)
            loss = tf.reduce_sum(output * factors[mine].astype(np.float32))
        np.testing.assert_allclose(output, right[mine], rtol=0, atol=1e-6)
        variables = layer.trainable_variables
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        every = [np.arange(cases.BUCKETS)] * len(layer.tables)
        read = sok.group_embedding_lookup(list(layer.tables.values()), every, training=False)
        rows = dict(zip(layer.tables, read, strict=True))
        for name, found in rows.items():
            expected = cases.rows_of(name, cases.DIMS[name]) - gradients[name]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)
        # A tf.Variable's gradients are averaged over ranks, as all ordinary gradients are.
        expected = cases.rows_of("hashed_embedding", 2) - gradients["hashed_embedding"] / 2
        np.testing.assert_allclose(cases.dense_weight(layer), expected, rtol=0, atol=1e-5)

    on_threads(2, check)
