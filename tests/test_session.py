"""TF 1's way: a graph, a session, `sok.Init`'s op first, and optimizers of tf.compat.v1.train."""

import pytest
import tensorflow as tf

from tests.checks import fields

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.2),
    "adam": lambda: v1.train.AdamOptimizer(0.02),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapped_optimizers_follow_stock_ones(sok, graph, name):
    def minimize(optimizer, loss, *_):
        words = r"'fields'.*sok.OptimizerWrapper\(optimizer\)"
        with pytest.raises(NotImplementedError, match=words):
            OPTIMIZERS[name]().minimize(loss)
        return optimizer.minimize(loss)

    fields.check_training(sok, OPTIMIZERS[name], minimize)


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
