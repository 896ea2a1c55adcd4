"""DeepRec's strategy trains as one process on the whole batch does, from rank 0's variables."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

v1 = tf.compat.v1
STEPS, BATCH, RATE = 5, 4, 0.1


def data(rank):
    """Features, keys and targets of a rank, and the weights with which it starts."""
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((BATCH, 3)).astype(np.float32)
    keys = rng.integers(0, 5, BATCH)
    y = rng.standard_normal((BATCH, 1)).astype(np.float32)
    return x, keys, y, rng.standard_normal((3, 1)).astype(np.float32)


def train(apart):
    """The weights and rows before each step."""
    strategy = sok.deeprec.CollectiveStrategy()
    try:
        with strategy.scope(), tf.Graph().as_default():
            return _train(strategy, apart)
    finally:
        sok.deeprec.uninstall()


def _train(strategy, apart):
    x, keys, y, start = data(strategy.rank())
    with strategy.embedding_scope():
        table = tf.get_embedding_variable(f"bias{apart}", 1, initializer=tf.ones_initializer())
        ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys), [1] * BATCH)
        (rows,) = tf.nn.group_embedding_lookup_sparse([table], [ids], ["sum"])
    weights = v1.get_variable("w", initializer=start)
    loss = tf.reduce_mean((tf.matmul(tf.constant(x), weights) + rows - y) ** 2)
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.GradientDescentOptimizer(RATE)
    if apart:
        dense = optimizer.minimize(loss, step, var_list=[weights])
        with tf.control_dependencies([dense]):
            other = v1.train.GradientDescentOptimizer(RATE)
            operation = other.minimize(loss, var_list=[table])
    else:
        operation = optimizer.minimize(loss, step)
    found = []
    with v1.train.MonitoredTrainingSession(hooks=[v1.train.StopAtStepHook(STEPS)]) as session:
        while not session.should_stop():
            found.append(session.run([weights, rows]))
            session.run(operation)
    return found


def whole_batch(world_size):
    """Weights and each rank's rows before each step, by NumPy."""
    x, keys, y, starts = (
        np.stack(arrays) for arrays in zip(*map(data, range(world_size)), strict=True)
    )
    x, keys, y = x.reshape(-1, 3), keys.reshape(-1), y.reshape(-1, 1)
    weights, table = starts[0].astype(float), np.ones((5, 1))
    found = []
    for _ in range(STEPS):
        rows = table[keys]
        found.append((weights, rows.reshape(world_size, BATCH, 1)))
        error = 2 * (x @ weights + rows - y) / len(x)
        moved = np.zeros_like(table)
        np.add.at(moved, keys, error)
        weights, table = weights - RATE * x.T @ error, table - RATE * moved
    return found


def both():
    """With one optimizer for all, and with one for each part."""
    return train(False), train(True)


@pytest.mark.ranks
def test_one_optimizer_for_all_and_one_for_each_part(on_processes):
    """The optimizer of the table alone sees the moved weights, on all ranks the same ones."""
    ranks, right = on_processes(2, both), whole_batch(2)
    for rank, (found, apart) in enumerate(ranks):
        for (weights, rows), (right_weights, right_rows) in zip(found, right, strict=True):
            np.testing.assert_allclose(weights, right_weights, rtol=1e-5)
            np.testing.assert_allclose(rows, right_rows[rank], rtol=1e-5)
        np.testing.assert_allclose(apart[1][0], right[1][0], rtol=1e-5)
        for (weights, _), (others, _) in zip(apart, ranks[0][1], strict=True):
            np.testing.assert_array_equal(weights, others)


def test_what_is_not_here_names_what_is(deeprec, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_STRATEGY", "ps")
    with pytest.raises(ValueError, match="must be one of.*'sok', 'hb'.*Received.*'ps'"):
        deeprec.CollectiveStrategy()
    assert not hasattr(tf, "get_embedding_variable")
    monkeypatch.delenv("COLLECTIVE_STRATEGY")
    strategy = deeprec.CollectiveStrategy()
    assert (strategy.rank(), strategy.world_size()) == (0, 1)
    with pytest.raises(NotImplementedError, match="MonitoredTrainingSession"):
        strategy.estimator(model_fn=None)
    with pytest.raises(NotImplementedError, match="sok.export_saved_model"):
        strategy.export_saved_model("folder", "checkpoint", None)


def test_after_the_scope_all_is_as_before(deeprec):
    strategy = deeprec.CollectiveStrategy()
    before = v1.train.Optimizer.apply_gradients, v1.train.MonitoredTrainingSession
    with pytest.raises(KeyError), strategy.scope():
        assert v1.train.MonitoredTrainingSession is not before[1]
        raise KeyError
    assert before == (v1.train.Optimizer.apply_gradients, v1.train.MonitoredTrainingSession)
