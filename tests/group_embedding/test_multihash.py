"""`get_multihash_variable` against two dense variables of stock TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1
IDS = [0, 1, 2, 4, 6, 7, 7]


@pytest.fixture
def multihash(sok):
    from sok_like.group_embedding.variables import get_multihash_variable

    return get_multihash_variable


def joined(rows, operation):
    if operation == "concat":
        return np.concatenate(rows, 1)
    return np.add(*rows) if operation == "add" else np.multiply(*rows)


@pytest.mark.parametrize(
    "operation, module", [("add", tf), ("mul", v1), ("mult", tf), ("concat", v1)]
)
def test_rows_and_their_training(multihash, operation, module):
    widths = (2, 4) if operation == "concat" else (3, 3)
    with tf.Graph().as_default(), v1.Session() as session:
        dims = [[5, widths[0]], [3, widths[1]]]
        initializer = v1.random_normal_initializer(seed=1)
        table = multihash("pair", dims, operation=operation, initializer=initializer)
        rows = module.nn.embedding_lookup(table, tf.constant(IDS))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train = optimizer.minimize(tf.reduce_sum(rows))
        session.run(v1.global_variables_initializer())
        dense = session.run(table.variables)
        quotients, remainders = np.array(IDS) // 5, np.array(IDS) % 3
        parts = [dense[0][quotients], dense[1][remainders]]
        np.testing.assert_allclose(session.run(rows), joined(parts, operation), rtol=1e-6)
        session.run(train)
        gradients = [np.ones_like(part) for part in parts]
        if operation in ("mul", "mult"):
            gradients = parts[::-1]
        for table_rows, places, gradient in zip(
            dense, (quotients, remainders), gradients, strict=True
        ):
            np.subtract.at(table_rows, places, np.float32(0.1) * gradient)
        for ours, right in zip(session.run(table.variables), dense, strict=True):
            np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 25])
def test_ids_that_no_row_stands_for(multihash, wrong):
    with tf.Graph().as_default(), v1.Session() as session:
        table = multihash("pair", [[5, 2], [5, 2]])
        rows = tf.nn.embedding_lookup(table, tf.constant([0, wrong]))
        session.run(v1.global_variables_initializer())
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"must be in \[0, 25\), the ids that table"
        ):
            session.run(rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dims": [[5, 2]]}, "`dims` must be two pairs"),
        ({"dims": [[5, 2], [0, 2]]}, "`dims` must be two pairs .*positive"),
        ({"dims": [[5, 2], [3, 4]]}, "`dims` must be of the same width if operation='add'"),
        ({"operation": "max"}, "`operation` must be one of"),
        ({"complementary_strategy": "R-Q"}, "`complementary_strategy` must be 'Q-R'"),
        ({"num_of_partitions": 3}, "`num_of_partitions` must be 2"),
    ],
)
def test_arguments(multihash, arguments, message):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        multihash(**{"name": "pair", "dims": [[5, 2], [3, 2]], **arguments})


def test_a_norm_is_refused(multihash):
    with tf.Graph().as_default():
        table = multihash("pair", [[5, 2], [3, 2]])
        with pytest.raises(ValueError, match="`max_norm` must be None"):
            tf.nn.embedding_lookup(table, [1], max_norm=1.0)
