"""Evaluation, which finds keys one by one in blocks: samples of any length against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.core.test_combine import shares

DIM, PRESENT = 6, 3000


@pytest.mark.parametrize(
    "dtype, combiner", [("float32", "sum"), ("bfloat16", "mean"), ("float32", "sqrtn")]
)
def test_samples_of_any_length(sok, dtype, combiner):
    rng = np.random.default_rng(5)
    table = sok.EmbeddingVariable(DIM, name="evaluated", dtype=dtype)
    tf.nn.embedding_lookup(table, tf.range(PRESENT, dtype=tf.int64))
    lengths = rng.integers(0, 40, 500)
    lengths[[3, 4, 5, -1]] = 5000, 0, 256, 300  # longer than a block, and none
    lengths[100:400] = 0  # more empty samples than a block has
    ids = rng.integers(0, PRESENT + 600, lengths.sum())  # some are missing
    rows = table.find(np.arange(PRESENT + 600))[0].numpy()
    given = rng.random(len(ids)).astype(np.float32) + 0.1
    for weights in (None, given):
        (out,) = sok.group_embedding_lookup_sparse(
            [table],
            [tf.RaggedTensor.from_row_lengths(ids, lengths)],
            [combiner],
            sp_weights=[
                None if weights is None else tf.RaggedTensor.from_row_lengths(weights, lengths)
            ],
            training=False,
        )
        factors = np.ones(len(ids)) if weights is None else weights.astype(np.float64)
        right = shares(ids, np.r_[0, np.cumsum(lengths)], combiner, factors, len(rows)) @ rows
        np.testing.assert_allclose(out, right, atol=2e-4)
    assert int(table.size()) == PRESENT
