"""What some ranks wrote, read by other numbers of them: the ranks' part is checks/other_ranks.py.

The oracle is stock Keras in this process: dense tables, the same samples in one batch.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import other_ranks
from tests.checks.other_ranks import (
    EPOCHS,
    RATE,
    WRITTEN,
    initial,
    on_top,
    read,
    samples,
    write,
)

each_pair = pytest.mark.parametrize("pair", [(2, 1), (1, 2)])
each_pair_of_threads = pytest.mark.parametrize("pair", [(1, 3), (3, 2)])
of_keras = pytest.mark.keras(slow=True)


def read_of(run, pair, kind, folder):
    """What readers hold of what writers have written."""
    writers, readers = pair
    run(writers, write, kind, folder)
    return run(readers, read, kind, folder)


@functools.cache
def trained(which):
    """By number of epochs: tables, Adam's moments of each, and the kernel, of stock layers."""
    tables, kernel = initial()
    ids, targets = samples()
    if which == "parallel":
        (tables, kernel), ids = other_ranks.Parallel().initial(), other_ranks.Parallel().ids()
    if which == "hashed":
        tables, kernel, ids = tables[:1], kernel[:4], ids[:1]
    inputs = [tf.keras.Input([1], dtype="int64") for _ in tables]
    layers = [
        tf.keras.layers.Embedding(*table.shape, tf.keras.initializers.Constant(table))
        for table in tables
    ]
    rows = [layer(each) for layer, each in zip(layers, inputs, strict=True)]
    model = tf.keras.Model(inputs, on_top(rows, kernel, f"{which}_oracle"))
    model.compile(tf.keras.optimizers.Adam(RATE), "mse", run_eagerly=True)
    states = {}
    for epoch in range(1, EPOCHS + 1):
        model.fit(ids, targets, batch_size=len(targets), shuffle=False, verbose=0)
        states[epoch] = {
            "tables": [layer.get_weights()[0] for layer in layers],
            "slots": [
                other_ranks.slots(model.optimizer, weight)
                for weight in (*(layer.weights[0] for layer in layers), model.layers[-1].kernel)
            ],
            "kernel": model.layers[-1].get_weights()[0],
        }
    return states


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def check_whole(states, which):
    for state, epoch in zip(states, (WRITTEN, EPOCHS), strict=True):
        expected = trained(which)[epoch]
        assert state["iterations"] == epoch
        near(state["kernel"], expected["kernel"])
        for mine, theirs in zip(state["tables"], expected["tables"], strict=True):
            near(mine, theirs)
        for mine, theirs in zip(state.get("slots", ()), expected["slots"], strict="slots" in state):
            assert len(mine) == 2 and mine.keys() == theirs.keys()
            for name in mine:
                near(mine[name], theirs[name])


@of_keras
@pytest.mark.ranks
@each_pair
def test_dense_tables_are_read_by_slice_with_their_slot_variables(on_processes, tmp_path, pair):
    for found in read_of(on_processes, pair, "Dense", tmp_path):
        for kind in other_ranks.Dense.kinds:
            check_whole(found[kind], "dense")


@functools.cache
def trained_in_a_loop(kind):
    """By number of epochs: tables of one process, and TensorFlow's own optimizer."""
    variables = [tf.Variable(table) for table in initial()[0]]
    optimizer, states = other_ranks.DenseTape.optimizer(kind), {}

    def lookup(ids):
        return [tf.gather(table, each) for table, each in zip(variables, ids, strict=True)]

    for epoch in range(1, EPOCHS + 1):
        other_ranks.DenseTape.train(lookup, variables, optimizer, 1)
        states[epoch] = [variable.numpy() for variable in variables]
    return states


@of_keras
@each_pair_of_threads
def test_slot_variables_of_older_optimizers_go_by_slice(on_threads, tmp_path, pair):
    for found in read_of(on_threads, pair, "DenseTape", tmp_path):
        for kind in other_ranks.DenseTape.kinds:
            for tables, epoch in zip(found[kind], (WRITTEN, EPOCHS), strict=True):
                for mine, expected in zip(tables, trained_in_a_loop(kind)[epoch], strict=True):
                    near(mine, expected)


@of_keras
@pytest.mark.ranks
@each_pair
def test_shards_of_model_parallel_are_read_by_any_number(on_processes, tmp_path, pair):
    for found in read_of(on_processes, pair, "Parallel", tmp_path):
        for kind in other_ranks.Parallel.kinds:
            check_whole(found[kind], "parallel")


def by_key(results, pair, state):
    """Arrays of all ranks in the order of the keys; each key is with its owner."""
    states = [found[state] for found in results]
    for rank, each in enumerate(states):
        assert (each["keys"] % pair[1] == rank).all()
    order = np.argsort(np.concatenate([each["keys"] for each in states]))
    names = ("keys", "rows", "slot_rows")
    return {name: np.concatenate([each[name] for each in states])[order] for name in names}, states


def check_hashed(results, pair, epochs):
    for number, epoch in enumerate(epochs):
        expected = trained("hashed")[epoch]
        found, states = by_key(results, pair, number)
        assert found["keys"].tolist() == list(range(len(expected["tables"][0])))
        near(found["rows"], expected["tables"][0])
        moments = expected["slots"][0]
        near(found["slot_rows"][:, :8], np.concatenate([*moments.values()][:2], axis=1))
        for state in states:
            assert state["iterations"] == epoch
            yield state, expected


@pytest.mark.keras
@each_pair_of_threads
def test_a_dump_is_restored_by_any_number(on_threads, tmp_path, pair):
    assert [*check_hashed(read_of(on_threads, pair, "Dump", tmp_path), pair, [WRITTEN])]


@pytest.mark.keras
@pytest.mark.ranks
@each_pair
def test_keras_backup_is_gone_on_with_by_any_number(on_processes, tmp_path, pair):
    results = read_of(on_processes, pair, "Backup", tmp_path)
    for state, expected in check_hashed(results, pair, [EPOCHS]):
        assert state["epochs"] == list(range(WRITTEN, EPOCHS))
        near(state["kernel"], expected["kernel"])


class Adam:
    """Kingma and Ba's, as TensorFlow 1 has it, in float64."""

    def __init__(self, rows):
        self.rows, self.m, self.v, self.step = rows.astype(np.float64), 0.0, 0.0, 0

    def update(self, gradient):
        self.step += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        rate = RATE * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        self.rows = self.rows - rate * self.m / (np.sqrt(self.v) + 1e-8)


@each_pair_of_threads
def test_a_saver_of_sessions_is_read_by_any_number(on_threads, tmp_path, pair):
    results = read_of(on_threads, pair, "Session", tmp_path)
    (rows, *_), kernel = initial()
    (ids, *_), targets = samples()
    adam, states = Adam(rows), []
    for _ in range(EPOCHS):
        error = adam.rows[ids[:, 0]] @ kernel[:4] - targets
        gradient = np.zeros_like(adam.rows)
        gradient[ids[:, 0]] = 2 / len(targets) * error * kernel[:4].T
        adam.update(gradient)
        states.append((adam.rows, np.concatenate([adam.m, adam.v], axis=1)))
    for number, epoch in enumerate((WRITTEN, EPOCHS)):
        found, held = by_key(results, pair, number)
        near(found["rows"], states[epoch - 1][0])
        near(found["slot_rows"][:, :8], states[epoch - 1][1])
        assert [each["iterations"] for each in held] == [epoch] * pair[1]
