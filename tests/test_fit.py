"""Keras' `fit` on 1 and 2 ranks against the same steps in NumPy, on the batch of all ranks."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import fit

pytestmark = pytest.mark.keras
each_world = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])


class Descent:
    """Plain gradient descent on one number."""

    def __init__(self, rate):
        self.rate = rate

    def update(self, slope):
        return self.rate * slope


class Adam(Descent):
    """Adam on one number, from zero moments, with Keras' betas and epsilon."""

    momentum = velocity = steps = 0

    def update(self, slope):
        self.steps += 1
        self.momentum += 0.1 * (slope - self.momentum)
        self.velocity += 0.001 * (slope**2 - self.velocity)
        rate = self.rate * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return rate * self.momentum / (np.sqrt(self.velocity) + 1e-7)


def trained(rules=(lambda: Descent(fit.RATE),)):
    """Rows by key after an epoch under each rule, on the mean squared error."""
    rows = dict.fromkeys(fit.KEYS.tolist(), 0.0)
    keys, targets = fit.samples()
    steps = list(zip(np.split(keys, fit.STEPS), np.split(targets, fit.STEPS), strict=True))
    for rule in rules:
        optimizers = {key: rule() for key in rows}
        for step_keys, step_targets in steps:
            outputs = np.array([sum(rows[key] for key in sample) for sample in step_keys.tolist()])
            slopes = 2 * (outputs - step_targets) / fit.BATCH
            for key in rows:
                slope = sum(slopes[(step_keys == key).any(axis=1)]) + sum(
                    slopes[(step_keys == key).all(axis=1)]
                )
                rows[key] -= optimizers[key].update(slope)
    return rows


def check(parts, expected=None):
    """The ranks' rows together are the rows trained in NumPy."""
    found = {key: row for part in parts for key, row in part.items()}
    expected = expected or trained()
    assert set(found) == set(expected)
    for key, row in expected.items():
        assert found[key] == pytest.approx(row, abs=1e-5), key


@each_world
@pytest.mark.parametrize("door", fit.DOORS)
def test_the_default_gradient_scale_is_right_under_fit(rank_results, door, world_size):
    ranks = rank_results(world_size, f"fit.fit_{door}")
    check([rank["rows"] for rank in ranks])
    assert [rank["told"] for rank in ranks] == [[]] * world_size


@each_world
def test_the_default_gradient_scale_is_right_in_a_train_step(rank_results, world_size):
    for graph_or_eager in zip(*rank_results(world_size, "fit.own_train_step"), strict=True):
        check(graph_or_eager)


@each_world
def test_a_second_compile_starts_anew(rank_results, world_size):
    rules = [lambda rate=rate: Adam(rate) for rate in fit.TUNED]
    check(rank_results(world_size, "fit.tuned"), trained(rules))


@each_world
def test_early_stopping_restores_the_best_rows(rank_results, world_size):
    for epochs, after in rank_results(world_size, "fit.best_restored"):
        assert len(epochs) == 3  # the third is worse than the second
        assert after == epochs[1] and after != epochs[2] and len(after) > 0


def test_histograms_of_tensorboard(sok, tmp_path):
    layer = fit.Distributed("histograms")
    model = fit.Model(layer)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(fit.RATE)), "mse")
    keys, targets = fit.samples()
    board = tf.keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1)
    # It makes a dense tensor of every weight.
    with pytest.raises(TypeError, match="'histograms' has no dense value"):
        model.fit(keys, targets, batch_size=fit.BATCH, shuffle=False, callbacks=[board], verbose=0)
    check([fit.rows_of(layer.table())])


@each_world
def test_a_loop_that_says_no_gradient_scale_sums_and_warns_once(rank_results, world_size):
    ranks = rank_results(world_size, "fit.own_loop")
    for scale in ("auto", "sum", "mean"):
        check([rank[scale] for rank in ranks])
    for rank in ranks:
        assert len(rank["told"]) == (world_size > 1), rank["told"]
        assert all("'mean'" in text and "'sum'" in text for text in rank["told"])


@each_world
def test_padding(rank_results, world_size):
    ranks = rank_results(world_size, "fit.padding")
    first = {name: found["output"] for name, found in ranks[0].items()}
    assert first["sum"] == [[[1], [0]], [[2], [1]]]
    assert first["mean"] == [[[1], [0]], [[1], [1]]]
    assert first["none"] == [[[[1], [0]], [[0], [0]]], [[[1], [1]], [[0], [1]]]]
    for rank in ranks[1:]:
        assert [np.sum(np.abs(rank[name]["output"])) for name in rank] == [0, 0, 0]
    # Key 1 is used three times, key 5 once; in a mean of two keys each counts half.
    expected = {"sum": {1: -2.0, 5: 0.0}, "mean": {1: -1.5, 5: 0.5}, "none": {1: -2.0, 5: 0.0}}
    for name, rows in expected.items():
        trained = {key: row for rank in ranks for key, row in rank[name]["rows"].items()}
        assert trained == rows
