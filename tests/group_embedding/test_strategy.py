"""`enable_distributed_strategy` and `deeprec.install`, in one process."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from sok_like import comm
from sok_like.core import initialize

v1 = tf.compat.v1


@pytest.fixture
def fresh(sok, monkeypatch):
    """The package, not initialised."""
    for name in comm._WORLD_SIZE_VARIABLES:
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


# ---- sok.deeprec.install ----

PLACES = [
    (root, module, name)
    for root in (tf, v1)
    for module, name in (
        ("nn", "group_embedding_lookup"),
        ("nn", "group_embedding_lookup_sparse"),
        ("config.experimental", "enable_distributed_strategy"),
    )
]


def module_of(root, path):
    for part in path.split("."):
        root = getattr(root, part)
    return root


@pytest.fixture
def deeprec(sok):
    yield sok.deeprec
    sok.deeprec.uninstall()


def test_installs_and_takes_back(sok, deeprec):
    assert not any(hasattr(module_of(r, m), n) for r, m, n in PLACES)
    for _ in range(2):
        deeprec.install()
        assert all(getattr(module_of(r, m), n) is getattr(sok, n) for r, m, n in PLACES)
    for _ in range(2):
        deeprec.uninstall()
        assert not any(hasattr(module_of(r, m), n) for r, m, n in PLACES)


@pytest.mark.parametrize("root, path, name", PLACES)
def test_a_name_that_is_taken(deeprec, monkeypatch, root, path, name):
    module = module_of(root, path)
    monkeypatch.setattr(module, name, len, raising=False)
    with pytest.raises(RuntimeError, match=f"must find no '{name}' in .*{path}"):
        deeprec.install()
    assert [n for r, m, n in PLACES if hasattr(module_of(r, m), n)] == [name]
    deeprec.uninstall()
    assert getattr(module, name) is len


def test_nothing_is_installed_by_loading():
    program = (
        "import tensorflow as tf, sok_like as sok\n"
        "sok.deeprec, sok.group_embedding_lookup_sparse\n"
        "print(hasattr(tf.nn, 'group_embedding_lookup_sparse'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_script_of_deeprec():
    """As on its page, in a program without eager execution, with one line added."""
    program = """
import sok_like as sok
import tensorflow.compat.v1 as tf

sok.deeprec.install()
tf.disable_eager_execution()
tf.config.experimental.enable_distributed_strategy(strategy="collective")
with tf.device("/CPU:0"):
    user = sok.EmbeddingVariable(4, name="user")
    item = tf.get_variable("item", [10, 4])
    ids = tf.SparseTensor([[0, 0], [1, 0], [1, 1]], tf.constant([1, 2, 3], tf.int64), [2, 2])
    out = tf.nn.group_embedding_lookup_sparse([user, item], [ids, ids], ["mean", "sum"])
    loss = tf.add_n([tf.reduce_sum(o * o) for o in out])
    train = sok.OptimizerWrapper(tf.train.AdagradOptimizer(0.1)).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    losses = [session.run([loss, train])[0] for _ in range(20)]
print(losses[-1] < losses[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
