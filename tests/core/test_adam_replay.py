"""Rows that were absent for many steps against a dense float64 loop over all steps."""

import numpy as np
import pytest

from sok_like import _core
from tests.core import oracles

DIM = 6


def schedule(name, step):
    rate = {
        "constant": 0.01,
        "decay": 0.02 / np.sqrt(step),
        "steps": (0.02, 0.005, 0.001)[min(step // 40, 2)],
        "warm_up": 0.01 * min(1.0, step / 100),
    }[name]
    return float(np.float32(rate))


def idle(table, rule, options, oracle, first, num_steps, rates):
    """Steps whose batches are empty, or hold another key."""
    empty, no_grads = np.zeros(0, np.int64), np.zeros((0, DIM), np.float32)
    for step in range(first, first + num_steps):
        rate = schedule(rates, step)
        if step % 3:
            keys, grads = empty, no_grads
        else:
            keys = np.array([7])
            # Of either sign: a row that wanders far off meets float32's own rounding.
            grads = np.full((1, DIM), 0.3 if step % 2 else -0.3, np.float32)
        _core.apply_gradients(table, rule, rate, step, keys, grads, **options)
        oracle.step(step, rate, keys, grads)


def make_pair(make_oracle):
    table = _core.Table("table", DIM, initializer="uniform", a=-0.5, b=0.5, seed=1)
    return table, make_oracle(table.find(np.arange(8))[0])


OPTIONS = {
    "default": {},
    "slow": {"beta_1": 0.99, "beta_2": 0.9999},
    "quick": {"beta_1": 0.5, "beta_2": 0.9},
    "step_by_step": {"beta_1": 0.9, "beta_2": 0.8},
    "epsilon": {"epsilon": 1e-3},
    "amsgrad": {"amsgrad": True},
    "weight_decay": {"weight_decay": 0.1},
    "no_beta_1": {"beta_1": 0.0},
    "decay_step_by_step": {"beta_1": 0.7, "beta_2": 0.6, "weight_decay": 0.1},
}


@pytest.mark.parametrize(
    "rates, gap",
    [(rates, gap) for rates in ("constant", "decay", "steps", "warm_up") for gap in (0, 1, 10, 500)]
    + [("constant", 5000), ("decay", 5000)],
)
@pytest.mark.parametrize("case", OPTIONS)
def test_gap(case, rates, gap):
    options = OPTIONS[case]
    table, oracle = make_pair(lambda w: oracles.Adam(w, **options))
    # Element d of key k has gradients of one magnitude between 1e-8 and 1e2.
    magnitude = 10.0 ** np.array([-8, -6, -4, -2, 0, 2])
    rng = np.random.default_rng(0)
    keys = np.arange(5)
    step = 0
    for _ in range(12):
        step += 1
        grads = (rng.normal(size=(5, DIM)) * magnitude).astype(np.float32)
        _core.apply_gradients(table, "adam", schedule(rates, step), step, keys, grads, **options)
        oracle.step(step, schedule(rates, step), keys, grads)
    idle(table, "adam", options, oracle, step + 1, gap, rates)
    np.testing.assert_allclose(table.find(np.arange(8))[0], oracle.w, atol=1e-5, rtol=0)
    # Updating after the gap needs the moments as well.
    step += gap + 1
    grads = (rng.normal(size=(5, DIM)) * magnitude).astype(np.float32)
    _core.apply_gradients(table, "adam", schedule(rates, step), step, keys, grads, **options)
    oracle.step(step, schedule(rates, step), keys, grads)
    np.testing.assert_allclose(table.find(np.arange(8))[0], oracle.w, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gap", [1, 10, 500])
@pytest.mark.parametrize("tf1", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_momentum_gap(weight_decay, nesterov, tf1, gap):
    options = {
        "momentum": 0.95,
        "nesterov": nesterov,
        "momentum_before_rate": tf1,
        "weight_decay": weight_decay,
    }
    table, oracle = make_pair(
        lambda w: oracles.Momentum(w, 0.95, nesterov=nesterov, tf1=tf1, weight_decay=weight_decay)
    )
    rng = np.random.default_rng(0)
    for step in range(1, 8):
        grads = rng.normal(size=(5, DIM)).astype(np.float32)
        rate = schedule("decay", step)
        _core.apply_gradients(table, "momentum", rate, step, np.arange(5), grads, **options)
        oracle.step(step, rate, np.arange(5), grads)
    idle(table, "momentum", options, oracle, 8, gap, "decay")
    np.testing.assert_allclose(table.find(np.arange(8))[0], oracle.w, atol=1e-5, rtol=0)


def test_a_read_does_not_count_as_a_step():
    """Reading rows in the middle of a gap, by either call, changes nothing in the end."""
    rows = []
    for reads in (False, True):
        table, oracle = make_pair(oracles.Adam)
        grads = np.ones((5, DIM), np.float32)
        _core.apply_gradients(table, "adam", 0.1, 1, np.arange(5), grads)
        oracle.step(1, 0.1, np.arange(5), grads)
        for chunk in range(6):
            idle(table, "adam", {}, oracle, 2 + 20 * chunk, 20, "constant")
            if reads:
                table.find(np.arange(5))
                table.find_or_insert(np.arange(5))
        rows.append(table.find(np.arange(5))[0])
        np.testing.assert_allclose(rows[-1], oracle.w[:5], atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-7, rtol=0)


def test_assigned_row_stands_from_then_on():
    options = {"weight_decay": 0.1}
    table, oracle = make_pair(lambda w: oracles.Adam(w, **options))
    grads = np.ones((3, DIM), np.float32)
    _core.apply_gradients(table, "adam", 0.1, 1, np.arange(3), grads, **options)
    oracle.step(1, 0.1, np.arange(3), grads)
    idle(table, "adam", options, oracle, 2, 10, "constant")
    rows = np.full((2, DIM), 0.25, np.float32)
    table.assign(np.array([2, 6]), rows)  # 2 has momentum, 6 is new
    oracle.w[[2, 6]] = 0.25
    np.testing.assert_array_equal(table.find(np.array([2, 6]))[0], rows)
    idle(table, "adam", options, oracle, 12, 10, "constant")
    np.testing.assert_allclose(table.find(np.arange(8))[0], oracle.w, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "weight_decay, rates",
    [
        (0.0, "decay"),
        (0.001, "constant"),
        pytest.param(0.0, "constant", marks=pytest.mark.slow),
        pytest.param(0.001, "decay", marks=pytest.mark.slow),
    ],
)
def test_gap_beyond_the_kept_steps(weight_decay, rates):
    """More than 65,536 steps: momentum's share is computed from the coded history."""
    options = {"beta_1": 0.9, "beta_2": 0.999, "weight_decay": weight_decay}
    table = _core.Table("table", 1, initializer="uniform", a=-0.5, b=0.5, seed=1)
    oracle = oracles.Adam(table.find(np.arange(4))[0], **options)
    # Rows that outweigh the history, which would be swept otherwise.
    table.find_or_insert(np.arange(10, 1_000_000))
    empty, no_grads = np.zeros(0, np.int64), np.zeros((0, 1), np.float32)
    num_steps = 70_000
    rng = np.random.default_rng(0)
    for step in range(1, num_steps + 1):
        rate = schedule(rates, step)
        # Key 1 last at step 2,000 and key 2 at step 69,000, long before and within the kept ones.
        last = {2000: 1, 69_000: 2}
        near = [k for at, k in last.items() if at - 20 < step <= at]
        keys = np.array(near) if near else empty
        grads = rng.normal(size=(len(near), 1)).astype(np.float32) if near else no_grads
        _core.apply_gradients(table, "adam", rate, step, keys, grads, **options)
        oracle.step(step, rate, keys, grads)
    np.testing.assert_allclose(table.find(np.arange(4))[0], oracle.w, atol=1e-5, rtol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.001])
def test_the_history_of_a_small_table_stays_small(weight_decay):
    """Under a schedule every step is a run of its own: the rows are brought up now and then."""
    options = {"weight_decay": weight_decay}
    table = _core.Table("table", 1, initializer="uniform", a=-0.5, b=0.5, seed=1)
    oracle = oracles.Adam(table.find(np.arange(4))[0], **options)
    sizes = []
    for step in range(1, 40_001):
        keys = np.array([step // 500 % 3] if step % 500 < 5 else [], np.int64)
        grads = np.full((len(keys), 1), 0.3 if step % 2 else -0.3, np.float32)
        rate = schedule("decay", step)
        _core.apply_gradients(table, "adam", rate, step, keys, grads, **options)
        oracle.step(step, rate, keys, grads)
        if step % 1000 == 0:
            sizes.append(table.stats()["bytes"])
    assert sizes[5] > sizes[0] + 300_000  # it is counted
    assert max(sizes) < 3 * 2**20
    np.testing.assert_allclose(table.find(np.arange(4))[0], oracle.w, atol=1e-5, rtol=0)
