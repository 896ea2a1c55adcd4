"""`enable_distributed_strategy`, in one process."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm, initialize, launchers

v1 = tf.compat.v1


@pytest.fixture
def fresh(sok, monkeypatch):
    """The package, not initialised."""
    for name in launchers.WORLD_SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    initialize.reset()
    return sok


def train(sok, strategy):
    """Rows of a table after a step of Adagrad, from a seed given with `sok.Init`."""
    initialize.reset()
    sok.enable_distributed_strategy(strategy)
    sok.Init(global_batch_size=2, seed=3)
    table = sok.EmbeddingVariable(2, name="same")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    with tf.GradientTape() as tape:
        ids = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)
        (found,) = sok.group_embedding_lookup_sparse([table], [ids], ["mean"])
        loss = tf.reduce_sum(found**2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return found.numpy(), table.find([1, 2])[0].numpy()


def test_on_one_process_they_are_the_same(fresh):
    collective = train(fresh, "collective")
    for strategy in ("localized", None):
        for left, right in zip(collective, train(fresh, strategy), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("strategy", ["parameter_server", "Collective", "", 1])
def test_unknown_strategy(fresh, strategy):
    with pytest.raises(ValueError, match="('collective', 'localized', None).*Received.*strategy="):
        fresh.enable_distributed_strategy(strategy)
    assert not comm.is_initialized()


@pytest.mark.parametrize("strategy", ["localized", None])
def test_localized_among_several_processes(fresh, monkeypatch, strategy):
    monkeypatch.setattr(comm, "launched_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match="private copy.*'collective'.*a job of 3 processes"):
        fresh.enable_distributed_strategy(strategy)
    assert not comm.is_initialized()


def test_instead_of_init_in_a_session(fresh):
    """No op to run: the rows of a seed drawn here are there at the first lookup."""
    with tf.Graph().as_default():
        fresh.enable_distributed_strategy()
        table = fresh.EmbeddingVariable(2, name="graph")
        rows = fresh.group_embedding_lookup([table], [[1, 2]])[0]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert np.unique(session.run(rows)).size == 4


def test_init_before_or_after(fresh):
    fresh.enable_distributed_strategy()
    fresh.Init(global_batch_size=4, seed=1)
    fresh.enable_distributed_strategy("collective")
    with pytest.raises(RuntimeError, match="called before"):
        fresh.Init(global_batch_size=8, seed=1)
