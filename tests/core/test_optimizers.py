"""Each rule against a dense float64 table over 60 steps of repeated, absent and new keys."""

import numpy as np
import pytest

from tests.core.oracles import ORACLES, Pair

NUM_ROWS = 300
TF1 = {"momentum": 0.9, "momentum_before_rate": True}

# (rule, options of apply_gradients and of the oracle)
CASES = {
    "sgd": ("sgd", {}),
    "momentum": ("momentum", {"momentum": 0.9}),
    "nesterov": ("momentum", {"momentum": 0.8, "nesterov": True}),
    "lazy_momentum": ("momentum", {"momentum": 0.9, "lazy": True}),
    "tf1_momentum": ("momentum", TF1),
    "tf1_nesterov_lazy": ("momentum", {**TF1, "nesterov": True, "lazy": True}),
    "tf1_nesterov": ("momentum", {**TF1, "nesterov": True}),
    "adagrad": ("adagrad", {"initial_accumulator": 0.1, "epsilon": 1e-3}),
    "rowwise_adagrad": ("rowwise_adagrad", {"initial_accumulator": 0.2, "epsilon": 1e-3}),
    "adam": ("adam", {}),
    "adam_large_epsilon": ("adam", {"epsilon": 0.1, "beta_1": 0.5, "beta_2": 0.99}),
    "adam_step_by_step": ("adam", {"beta_1": 0.8, "beta_2": 0.5}),
    "adam_no_beta_1": ("adam", {"beta_1": 0.0}),
    "adam_no_beta_2": ("adam", {"beta_2": 0.0, "epsilon": 0.1}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "lazy_adam": ("lazy_adam", {}),
    "lazy_amsgrad": ("lazy_adam", {"amsgrad": True}),
    "adam_of_rows_with_decay": ("lazy_adam", {"row_weight_decay": 0.2}),
    "adagrad_decay": (
        "adagrad_decay",
        {"initial_accumulator": 0.3, "decay_steps": 4, "decay_rate": 0.5},
    ),
    "rmsprop": ("rmsprop", {"beta_1": 0.6, "beta_2": 0.9, "epsilon": 1e-3}),
    "ftrl": ("ftrl", {}),
    "ftrl_all": (
        "ftrl",
        {"l1": 0.05, "l2": 0.1, "l2_shrinkage": 0.02, "beta": 0.3, "learning_rate_power": -0.6},
    ),
}
# Without a past, v + (g^2 - v) in float32 keeps rounding errors of a larger v before it (as Keras
# does); the oracle's double does not.
TOLERANCE = {"adam_no_beta_2": 5e-4}
EXTRAS = {
    "plain": {},
    "clip": {"clip_value": 0.5},
    "weight_decay": {"weight_decay": 0.05},
}
ONE = np.array([1]), np.ones((1, 2), np.float32)  # a batch of tables of dim 2


def make_table(core, dim, name="table"):
    return core.Table(name, dim, initializer="uniform", a=-0.5, b=0.5, seed=3)


def random_keys(rng, step):
    """Few of many keys, some twice; rows above 200 appear late; every eighth batch is empty."""
    if step % 8 == 7:
        return np.zeros(0, np.int64)
    high = 200 if step < 40 else NUM_ROWS
    return rng.integers(0, high, rng.integers(1, 60)).astype(np.int64)


@pytest.mark.parametrize("dim", [1, 5, 16, 24])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("case", CASES)
def test_rule_follows_its_formula(core, case, extra, dim):
    rule, options = CASES[case]
    pair = Pair(core, rule, {**options, **EXTRAS[extra]}, dim, NUM_ROWS)
    rng = np.random.default_rng(0)
    for step in range(1, 61):
        keys = random_keys(rng, step)
        grads = rng.normal(size=(len(keys), dim)).astype(np.float32)
        pair.step(step, 0.05 if step < 20 else 0.08 / step, keys, grads)
        if dim == 5 and step % 7 == 0:  # what is read in between changes nothing
            pair.table.find(pair.keys)
            pair.table.find_or_insert(rng.integers(0, NUM_ROWS, 5))
            pair.table.export()
    # Rows that were never inserted read as the dense table would: decayed.
    tolerance = TOLERANCE.get(case, 1e-5)
    pair.compare(tolerance)
    keys, rows, _ = pair.table.export(with_slots=False)
    np.testing.assert_allclose(rows, pair.oracle.w[keys], atol=tolerance, rtol=0)


def test_unique_keys_need_no_search(core):
    searched, trusted = make_table(core, 4), make_table(core, 4)
    keys = np.arange(100) * 7 - 50
    grads = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    core.apply_gradients(searched, "adagrad", 0.1, 1, keys, grads)
    core.apply_gradients(trusted, "adagrad", 0.1, 1, keys, grads, keys_are_unique=True)
    np.testing.assert_array_equal(searched.find(keys)[0], trusted.find(keys)[0])


@pytest.mark.parametrize("rule", ORACLES)
def test_non_finite_gradients_stay_in_their_row(core, rule):
    table = make_table(core, 2)
    options = {"momentum": 0.9} if rule == "momentum" else {}
    grads = np.array([[np.nan, 1.0], [1.0, 1.0]], np.float32)
    core.apply_gradients(table, rule, 0.1, 1, np.array([1, 2]), grads, **options)
    rows = table.find(np.array([1, 2]))[0]
    assert np.isnan(rows[0, 0])
    assert np.isfinite(rows[1]).all()


def test_other_rule_or_option_is_refused(core):
    table = make_table(core, 2, "user")
    core.apply_gradients(table, "adam", 0.1, 1, *ONE)
    before = table.find(ONE[0])[0]
    with pytest.raises(ValueError, match=r"'user' has adam\(beta_1=0.9.*Received: adagrad"):
        core.apply_gradients(table, "adagrad", 0.1, 2, *ONE)
    with pytest.raises(ValueError, match=r"beta_1=0.9,.*Received: adam\(beta_1=0.8,"):
        core.apply_gradients(table, "adam", 0.1, 2, *ONE, beta_1=0.8)
    np.testing.assert_array_equal(table.find(ONE[0])[0], before)


@pytest.mark.parametrize(
    "rule, options, learning_rate, step, message",
    [
        ("adamax", {}, 0.1, 1, "must be one of sgd"),
        ("adam", {"beta_1": 1.0}, 0.1, 1, r"`beta_1` must be in \[0, 0.9995\]"),
        ("adam", {"beta_2": -0.1}, 0.1, 1, "`beta_2`"),
        ("adam", {"epsilon": float("nan")}, 0.1, 1, "`epsilon`"),
        ("momentum", {"momentum": 1.5}, 0.1, 1, "`momentum`"),
        ("ftrl", {"learning_rate_power": 0.5}, 0.1, 1, "`learning_rate_power`"),
        ("ftrl", {}, 0.0, 1, "`learning_rate` must be a finite positive"),
        ("sgd", {}, float("inf"), 1, "`learning_rate`"),
        ("adagrad_decay", {"decay_steps": 0}, 0.1, 1, "`decay_steps` must be positive"),
        ("adagrad_decay", {"decay_rate": 1.0}, 0.1, 1, r"`decay_rate` must be in \(0, 1\)"),
        ("adagrad_decay", {"initial_accumulator": 0.0}, 0.1, 1, "`initial_accumulator`"),
        ("rmsprop", {"beta_1": 1.0}, 0.1, 1, "`beta_1`"),
        ("lazy_adam", {"row_weight_decay": 1.0}, 0.1, 1, "`row_weight_decay`"),
        ("adam", {"row_weight_decay": 0.1}, 0.1, 1, "`row_weight_decay` must be 0 unless"),
        ("sgd", {}, 0.1, 0, "`step` counts from 1"),
        ("sgd", {"weight_decay": 20.0}, 0.1, 1, "must be below 1"),
        ("sgd", {"clip_value": -1.0}, 0.1, 1, "`clip_value`"),
    ],
)
def test_what_cannot_be_honoured_raises(core, rule, options, learning_rate, step, message):
    table = make_table(core, 2)
    with pytest.raises(ValueError, match=message):
        core.apply_gradients(table, rule, learning_rate, step, *ONE, **options)
    with pytest.raises(TypeError, match="no optimizer option 'clipnorm'"):
        core.apply_gradients(table, "sgd", 0.1, 1, *ONE, clipnorm=1.0)
    assert table.size == 0


def test_a_key_that_comes_between_an_import_and_the_optimizer(core):
    table = make_table(core, 2)
    accumulators = np.full((1, 2), 3.0, np.float32)
    table.import_(np.array([1]), np.ones((1, 2)), {"accumulator": accumulators})
    table.find_or_insert(np.array([2]))  # as a lookup does before the first update
    grads = np.full((1, 2), 2.0, np.float32)
    core.apply_gradients(table, "adagrad", 0.1, 1, np.array([2]), grads, initial_accumulator=0.5)
    slots = table.export()[2]["accumulator"]
    np.testing.assert_array_equal(slots, [[3, 3], [4.5, 4.5]])


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_assignments_between_steps_follow_the_dense_table(core, case, use_hashtable):
    """Weights are as assigned at that step; moments stay, and later steps go on from there.

    The kinds of batches are in cpp/tests/assign_test.cc.
    """
    rule, options = CASES[case]
    num_rows, dim = 5000, 5
    table_options = {"use_hashtable": use_hashtable, "max_capacity": num_rows}
    pair = Pair(core, rule, {**options, "weight_decay": 0.02}, dim, num_rows, **table_options)
    rng = np.random.default_rng(4)
    for step in range(1, 26):
        # Keys with gradients become rows early, the others are new when they are assigned.
        keys = rng.integers(0, 300, 40)
        pair.step(step, 0.03, keys, rng.normal(size=(40, dim)).astype(np.float32))
        if step % 5 == 0:
            # Large and nearly all new; then a mixture of present, new and repeated keys.
            if step == 15:
                keys = rng.permutation(np.r_[np.arange(1000, 2500), 1000:1200, 0:3])
            else:
                keys = rng.integers(0, 600 + 100 * step, 1500)
            rows = rng.standard_normal((keys.size, dim)).astype(np.float32)
            pair.table.assign(keys, rows)
            last = dict(zip(keys.tolist(), rows, strict=True))
            pair.oracle.w[list(last)] = list(last.values())
            found = pair.table.find(keys)[0]
            np.testing.assert_array_equal(found, [last[k] for k in keys.tolist()])
    pair.compare(TOLERANCE.get(case, 2e-5))
