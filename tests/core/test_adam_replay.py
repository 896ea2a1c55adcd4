"""Rows that were absent for many steps against a dense float64 loop over all steps."""

import itertools

import numpy as np
import pytest

from sok_like import _core
from tests.core import oracles

DIM = 6
RATES = ("constant", "decay", "steps", "warm_up")
NONE = np.zeros(0, np.int64), np.zeros((0, DIM), np.float32)

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


def schedule(name, step):
    return {
        "constant": 0.01,
        "decay": 0.02 / step**0.5,
        "steps": (0.02, 0.005, 0.001)[min(step // 40, 2)],
        "warm_up": 0.01 * min(1.0, step / 100),
    }[name]


def adam(core, num_rows=8, dim=DIM, **options):
    return oracles.Pair(core, "adam", options, dim, num_rows)


def idle(pair, first, num_steps, rates):
    """Steps whose batches are empty, or hold another key."""
    for step in range(first, first + num_steps):
        # Of either sign: a row that wanders far off meets float32's own rounding.
        other = np.array([7]), np.full((1, DIM), 0.3 if step % 2 else -0.3, np.float32)
        pair.step(step, schedule(rates, step), *(NONE if step % 3 else other))


@pytest.mark.parametrize(
    "rates, gap",
    [*itertools.product(RATES, (1, 10, 500)), ("constant", 0), ("constant", 5000)],
)
@pytest.mark.parametrize("case", OPTIONS)
def test_gap(core, case, rates, gap):
    pair = adam(core, **OPTIONS[case])
    # Element d of key k has gradients of one magnitude between 1e-8 and 1e2.
    magnitude = 10.0 ** np.array([-8, -6, -4, -2, 0, 2])
    rng = np.random.default_rng(0)

    def update(step):
        grads = (rng.normal(size=(5, DIM)) * magnitude).astype(np.float32)
        pair.step(step, schedule(rates, step), np.arange(5), grads)

    for step in range(1, 13):
        update(step)
    idle(pair, 13, gap, rates)
    pair.compare()
    update(13 + gap)  # needs the moments as well
    pair.compare()


@pytest.mark.parametrize("gap", [1, 10, 500])
@pytest.mark.parametrize("tf1", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_momentum_gap(core, weight_decay, nesterov, tf1, gap):
    options = {"momentum": 0.95, "nesterov": nesterov, "momentum_before_rate": tf1}
    pair = oracles.Pair(core, "momentum", {**options, "weight_decay": weight_decay}, DIM, 8)
    rng = np.random.default_rng(0)
    for step in range(1, 8):
        grads = rng.normal(size=(5, DIM)).astype(np.float32)
        pair.step(step, schedule("decay", step), np.arange(5), grads)
    idle(pair, 8, gap, "decay")
    pair.compare()


def test_assigned_row_stands_from_then_on(core):
    pair = adam(core, weight_decay=0.1)
    pair.step(1, 0.1, np.arange(3), np.ones((3, DIM), np.float32))
    idle(pair, 2, 10, "constant")
    rows = np.full((2, DIM), 0.25, np.float32)
    pair.table.assign(np.array([2, 6]), rows)  # 2 has momentum, 6 is new
    pair.oracle.w[[2, 6]] = 0.25
    np.testing.assert_array_equal(pair.table.find(np.array([2, 6]))[0], rows)
    idle(pair, 12, 10, "constant")
    pair.compare()


@pytest.mark.parametrize(
    "weight_decay, rates",
    [
        (0.001, "decay"),
        pytest.param(0.001, "constant", marks=pytest.mark.slow),
        pytest.param(0.0, "decay", marks=pytest.mark.slow),
        pytest.param(0.0, "constant", marks=pytest.mark.slow),
    ],
)
def test_gap_beyond_the_kept_steps(weight_decay, rates):
    """More than 65,536 steps: momentum's share is computed from the coded history."""
    pair = adam(_core, num_rows=4, dim=1, weight_decay=weight_decay)
    # Rows that outweigh the history, which would be swept otherwise.
    pair.table.find_or_insert(np.arange(10, 1_000_000))
    rng = np.random.default_rng(0)
    # Key 1 last at step 2,000 and key 2 at step 69,000, long before and within the kept ones.
    last = {2000: 1, 69_000: 2}
    for step in range(1, 70_001):
        keys = np.array([k for at, k in last.items() if at - 20 < step <= at], np.int64)
        grads = rng.normal(size=(len(keys), 1)).astype(np.float32)
        pair.step(step, schedule(rates, step), keys, grads)
    pair.compare()


@pytest.mark.parametrize("weight_decay", [0.0, 0.001])
def test_the_history_of_a_small_table_stays_small(weight_decay):
    """Under a schedule every step is a run of its own: the rows are brought up now and then."""
    pair, sizes = adam(_core, num_rows=4, dim=1, weight_decay=weight_decay), []
    for step in range(1, 40_001):
        keys = np.array([step // 500 % 3] if step % 500 < 5 else [], np.int64)
        grads = np.full((len(keys), 1), 0.3 if step % 2 else -0.3, np.float32)
        pair.step(step, schedule("decay", step), keys, grads)
        if step % 1000 == 0:
            sizes.append(pair.table.stats()["bytes"])
    assert sizes[5] > sizes[0] + 300_000  # it is counted
    assert max(sizes) < 3 * 2**20
    pair.compare()
