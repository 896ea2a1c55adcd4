"""TF 1's way: a graph, a session, `sok.Init`'s op first, and optimizers of tf.compat.v1.train."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.checks import fields
from tests.optimizers.test_graph_step import UNIQUE, train
from tests.training import train_step

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
STEPS = 12
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.2),
    "adam": lambda: v1.train.AdamOptimizer(0.02),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.2),
}


def stock(make, initial):
    """The same with a dense table and row numbers, eagerly."""
    table, weight, optimizer = tf.Variable(initial), tf.Variable(tf.ones([6])), make()
    for step in range(STEPS):
        keys, targets = fields.batch(step)
        rows = np.searchsorted(UNIQUE, keys)

        def loss_of(rows=rows, targets=targets):
            found = tf.reshape(tf.gather(table, rows), [-1, 6])
            return tf.reduce_mean((tf.linalg.matvec(found, weight) - targets) ** 2)

        train_step(optimizer, [table, weight], loss_of)
    return table.numpy(), weight.numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapped_optimizers_follow_stock_ones(sok, graph, name):
    init, make = sok.Init(global_batch_size=4, seed=2), OPTIMIZERS[name]
    keys, targets, loss, layer, weight = fields.build(sok)
    with pytest.raises(NotImplementedError, match=r"'fields'.*sok.OptimizerWrapper\(optimizer\)"):
        make().minimize(loss)
    op = sok.OptimizerWrapper(make()).minimize(loss)
    initial, rows, trained = train(init, keys, targets, op, layer, weight, STEPS)
    with context.eager_mode():  # outside the graph that the fixture is building
        expected, expected_weight = stock(make, initial)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trained, expected_weight, rtol=0, atol=1e-5)
    assert np.abs(rows - initial).max() > 0.01


def test_variables_are_in_the_graphs_collections(sok, graph):
    sok.Init(global_batch_size=4)
    variable = sok.EmbeddingVariable(3, name="users")
    frozen = sok.EmbeddingVariable(3, name="frozen", trainable=False)
    trainable, every = v1.trainable_variables(), v1.global_variables()
    assert [any(v is x for v in trainable) for x in (variable, frozen)] == [True, False]
    assert any(v is frozen for v in every)
    assert variable.name == "users:0" and variable.shape[1] == 3
    assert isinstance(variable.initializer, tf.Operation)
    assert sok.EmbeddingVariable(3, name="users").name == "users_1:0"


def test_a_table_in_a_session(sok, graph):
    """Evaluation inserts nothing, errors are raised, and the initializer empties it."""
    init = sok.Init(global_batch_size=4)
    layer = sok.All2AllDenseEmbedding(3, 2, 1, 1, dynamic_input=True, name="small")
    keys, size = v1.placeholder(tf.int64, [None]), layer.table.size()
    read, found = (layer(keys, training=training) for training in (False, True))
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        session.run(read, {keys: [1, 2]})
        assert session.run(size) == 0
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"max_capacity=3.*'small'"):
            session.run(found, {keys: [1, 2, 3, 4]})
        assert session.run(found, {keys: [1, 2, 3]}).shape == (3, 2)
        assert session.run(size) == 3
        session.run(v1.global_variables_initializer())
        assert session.run(size) == 0
