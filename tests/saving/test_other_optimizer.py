"""A table that gets another optimizer through a file: rows stay, the optimizer's state starts anew.

The oracle is a dense variable with the same rows, under the stock optimizer from its first step.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import files
from tests.checks.files import check_same
from tests.saving.test_restore import copied
from tests.training import apply_gradient, content

pytestmark = pytest.mark.keras
keras = tf.keras.optimizers
KEYS = np.arange(3)
MAKE = {
    "sgd": lambda: keras.SGD(0.1),
    "momentum": lambda: keras.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.Adagrad(0.1),
    "adam": lambda: keras.Adam(0.01),
    "amsgrad": lambda: keras.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.AdamW(0.01, weight_decay=0.1),
    "ftrl": lambda: keras.Ftrl(0.1),
    "v1_momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
}


def gradient_of(step):
    return np.array([[1.0, -0.5], [0.3, 2.0], [-1.0, 1.0]], np.float32) * (1 + step % 3)


def train_table(table, optimizer, steps):
    for step in range(steps):
        apply_gradient(optimizer, table, KEYS, gradient_of(step))


def rows_after(rows, optimizer, steps):
    variable = tf.Variable(rows)
    for step in range(steps):
        optimizer.apply_gradients([(tf.constant(gradient_of(step)), variable)])
    return variable.numpy()


def table_of(sok, optimizer, steps=20):
    table = sok.EmbeddingVariable(2, name="users", initializer="ones")
    train_table(table, sok.OptimizerWrapper(optimizer), steps)
    return table


CHANGES = """
sgd-adam sgd-ftrl momentum-adam momentum-v1_momentum v1_momentum-momentum adagrad-adam adagrad-adamw
adagrad-ftrl adam-amsgrad amsgrad-adam adam-sgd adam-momentum ftrl-adagrad
"""


@pytest.mark.parametrize("change", CHANGES.split())
def test_another_rule_starts_anew(sok, tmp_path, capfd, change):
    first, second = change.split("-")
    source = table_of(sok, MAKE[first]())
    way = {"adam": "checkpoint", "sgd": "copy"}.get(second, "dump")
    for steps_before in (0, 2):  # of the second optimizer, before the content comes
        target = sok.EmbeddingVariable(2, name="users")
        optimizer = sok.OptimizerWrapper(MAKE[second]())
        train_table(target, optimizer, steps_before)
        copied(sok, way, tmp_path, source, target)
        if hasattr(optimizer, "iterations"):
            optimizer.iterations.assign(20)  # as a checkpoint of the first optimizer says
        check_same(content(target), content(source))  # what was read can be written again
        rows = target.find(KEYS)[0].numpy()
        train_table(target, optimizer, 10)
        expected = rows_after(rows, MAKE[second](), 10)
        np.testing.assert_allclose(target.find(KEYS)[0], expected, rtol=1e-5, atol=1e-6)
        assert int(target.snapshot().optimizer_step) == 10
        told = capfd.readouterr().err
        assert told.count("table 'users' holds what ") == 1, told
        assert "after 20 steps" in told and "start anew" in told


@pytest.mark.parametrize("first, second", [("adam", "lazy"), ("lazy", "adam"), ("adam", "adamw")])
def test_rules_with_the_same_moments_go_on(sok, tmp_path, capfd, first, second):
    """All rows are in each batch, where Adam, LazyAdam and AdamW without decay agree."""
    make = {
        "adam": lambda: sok.OptimizerWrapper(keras.Adam(0.01)),
        "adamw": lambda: sok.OptimizerWrapper(keras.AdamW(0.01, weight_decay=0.0)),
        "lazy": lambda: sok.OptimizerWrapper(keras.Adam(0.01), lazy=True),
    }
    source = sok.EmbeddingVariable(2, name="users", initializer="ones")
    train_table(source, make[first](), 21)
    target = copied(sok, "dump", tmp_path, source, sok.EmbeddingVariable(2, name="users"))
    train_table(target, make[second](), 9)
    expected = rows_after(np.ones([3, 2], np.float32), keras.Adam(0.01), 30)
    np.testing.assert_allclose(target.find(KEYS)[0], expected, rtol=1e-5)
    assert int(target.snapshot().optimizer_step) == 30
    assert "anew" not in capfd.readouterr().err


def test_an_optimizer_for_each_table(sok, tmp_path):
    """SGD trained both; now `users` has Adam, and `items` keeps SGD."""
    tables, new = (
        [sok.EmbeddingVariable(2, name=name, initializer="ones") for name in ("users", "items")]
        for _ in range(2)
    )
    sgd = sok.OptimizerWrapper(keras.SGD(0.1))
    for table in tables:
        train_table(table, sgd, 20)
    path = tf.train.Checkpoint(tables=tables, optimizer=sgd).save(str(tmp_path / "both"))
    optimizer = sok.OptimizerWrapper({"users": keras.Adam(0.01)}, default=keras.SGD(0.1))
    status = tf.train.Checkpoint(tables=new, optimizer=optimizer).restore(path)
    status.expect_partial()
    rows = new[0].find(KEYS)[0].numpy()
    for step in range(10):
        gradient = tf.IndexedSlices(tf.constant(gradient_of(step)), tf.constant(KEYS))
        optimizer.apply_gradients([(gradient, table) for table in new])
    assert int(optimizer.iterations) in (30, 50)  # restored, and ten
    expected = rows_after(rows, keras.Adam(0.01), 10)
    np.testing.assert_allclose(new[0].find(KEYS)[0], expected, rtol=1e-5)
    assert [int(table.snapshot().optimizer_step) for table in new] == [10, 50]


@pytest.mark.parametrize("container", files.KINDS)
def test_files_of_models(sok, tmp_path, container):
    """Adagrad, a file, Adam: ten steps with gradient 1 move all rows by 10 * 0.01."""

    def model_of(optimizer):
        keys = tf.keras.Input([2], dtype="int64")
        layer = sok.All2AllDenseEmbedding(None, 2, 2, 1, dynamic_input=False, name="rows")
        model = tf.keras.Model(keys, layer(keys))
        model.compile(sok.OptimizerWrapper(optimizer), loss=lambda _, y: tf.reduce_sum(y, [1, 2]))
        return model

    ids, targets = np.array([[0, 1]]), np.zeros([1, 2])
    # One learning rate, because a checkpoint holds it.
    first, second = model_of(keras.Adagrad(0.01)), model_of(keras.Adam(0.01))
    first.fit(ids, targets, epochs=20, verbose=0)
    files.write(first, tmp_path, [container])
    if container == "model":
        second = tf.keras.models.load_model(tmp_path / "m.keras", compile=False)
        second.compile(sok.OptimizerWrapper(keras.Adam(0.01)), first.loss)
    elif container == "checkpoint":
        tf.train.Checkpoint(model=second).read(str(tmp_path / "c")).expect_partial()
    else:
        files.load("weights", second, tmp_path)
    before = second.predict(ids, verbose=0)
    np.testing.assert_array_equal(before, first.predict(ids, verbose=0))
    second.fit(ids, targets, epochs=10, verbose=0)
    np.testing.assert_allclose(before - second.predict(ids, verbose=0), 0.1, rtol=1e-4)
