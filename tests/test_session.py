"""TF 1's way: a graph, a session, `sok.Init`'s op first, and optimizers of tf.compat.v1.train."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import fields
from tests.checks.fields import KEYS

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.2),
    "adam": lambda: v1.train.AdamOptimizer(0.02),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.2),
}


def build(sok, optimizer):
    """The fields' placeholders, loss, layer and weight, and the training op."""
    keys, targets, loss, layer, weight = fields.build(sok)
    train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
    return keys, targets, loss, layer, weight, train


def run_sok(sok, make, steps=12):
    init = sok.Init(global_batch_size=4, seed=2)
    keys, targets, loss, layer, weight, train = build(sok, sok.OptimizerWrapper(make()))
    exported = sok.export(layer.embedding_variable)
    every = v1.placeholder(tf.int64, [None])
    read = layer.table.find(every)[0]
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        initial = session.run(read, {every: np.unique(KEYS)})
        for step in range(steps):
            batch_keys, batch_targets = fields.batch(step)
            session.run([train, loss], {keys: batch_keys, targets: batch_targets})
        assert session.run(v1.train.get_global_step()) == steps
        return initial, session.run(exported), session.run(weight)


def run_stock(make, initial, steps=12):
    """The same with a dense table and row numbers."""
    with tf.Graph().as_default():
        table = v1.get_variable("table", initializer=tf.constant(initial))
        rows = v1.placeholder(tf.int64, [None, 2])
        targets = v1.placeholder(tf.float32, [None])
        weight = v1.get_variable("weight", [6], initializer=v1.ones_initializer())
        found = tf.nn.embedding_lookup(table, rows)
        output = tf.linalg.matvec(tf.reshape(found, [-1, 6]), weight)
        train = make().minimize(tf.reduce_mean((output - targets) ** 2))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for step in range(steps):
                batch_keys, batch_targets = fields.batch(step)
                numbers = np.searchsorted(np.unique(KEYS), batch_keys)
                session.run(train, {rows: numbers, targets: batch_targets})
            return session.run([table, weight])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapped_optimizers_follow_stock_ones(sok, graph, name):
    make = OPTIMIZERS[name]
    initial, (keys, rows), weight = run_sok(sok, make)
    table, stock_weight = run_stock(make, initial)
    assert set(keys.tolist()) == set(np.unique(KEYS).tolist())
    numbers = np.searchsorted(np.unique(KEYS), keys)
    np.testing.assert_allclose(rows, table[numbers], rtol=0, atol=1e-5)
    np.testing.assert_allclose(weight, stock_weight, rtol=0, atol=1e-5)
    assert np.abs(table - initial).max() > 0.01


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_optimizer_names_the_wrapper(sok, graph, name):
    sok.Init(global_batch_size=4)
    with pytest.raises(NotImplementedError, match=r"'fields'.*sok.OptimizerWrapper\(optimizer\)"):
        build(sok, OPTIMIZERS[name]())


def test_variables_are_in_the_graphs_collections(sok, graph):
    sok.Init(global_batch_size=4)
    variable = sok.EmbeddingVariable(3, name="users")
    frozen = sok.EmbeddingVariable(3, name="frozen", trainable=False)
    assert any(v is variable for v in v1.trainable_variables())
    assert not any(v is frozen for v in v1.trainable_variables())
    assert any(v is frozen for v in v1.global_variables())
    assert variable.name == "users:0"
    assert variable.shape[1] == 3
    assert isinstance(variable.initializer, tf.Operation)
    assert sok.EmbeddingVariable(3, name="users").name == "users_1:0"


def test_initializer_empties_the_table(sok, graph):
    init = sok.Init(global_batch_size=4)
    variable = sok.EmbeddingVariable(2, name="users")
    fill = sok.assign(variable, [1, 2], np.ones([2, 2]))
    size = variable.size()
    with v1.Session() as session:
        session.run(init)
        session.run(variable.initializer)
        session.run(fill)
        assert session.run(size) == 2
        session.run(v1.global_variables_initializer())
        assert session.run(size) == 0


def test_evaluation_inserts_nothing(sok, graph):
    init = sok.Init(global_batch_size=4)
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True)
    found = layer(tf.constant([1, 2], tf.int64), training=False)
    size = layer.table.size()
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        session.run(found)
        assert session.run(size) == 0


def test_errors_reach_session_run(sok, graph):
    init = sok.Init(global_batch_size=4)
    layer = sok.All2AllDenseEmbedding(3, 2, 1, 1, dynamic_input=True, name="small")
    keys = v1.placeholder(tf.int64, [None])
    found = layer(keys, training=True)
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"max_capacity=3.*'small'"):
            session.run(found, {keys: [1, 2, 3, 4]})
        assert session.run(found, {keys: [1, 2, 3]}).shape == (3, 2)


def test_two_steps_that_share_a_table_in_one_run(sok, graph):
    init = sok.Init(global_batch_size=4)
    layer = sok.All2AllDenseEmbedding(
        None, 1, 1, 1, dynamic_input=True, embedding_initializer="zeros"
    )
    optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0))
    loss = tf.reduce_sum(layer(tf.constant([1, 2, 1], tf.int64), training=True))
    train = optimizer.minimize(loss)
    read = layer.table.find(tf.constant([1, 2], tf.int64))[0]
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(train)
        assert session.run(read).tolist() == [[-4.0], [-2.0]]
