"""Policies: threads, Bloom filters, optimizer state, errors."""

import numpy as np
import pytest

from sok_like import _core
from tests.core.policy_model import Model
from tests.core.test_policies import DIM, INITIAL, add_up, make

# ---- threads and order ----


def large_run(table, num_keys, batch, steps, orders=None):
    """The state of a table after large lookups, which evict; keys of a lookup in some order."""
    universe, rng = np.arange(num_keys) * 0x9E3779B97F4A7C1 - 2**62, np.random.default_rng(2)
    for step in range(steps):
        keys = universe[rng.integers(0, num_keys, batch)]
        table.observe(orders.permutation(keys) if orders else keys)
        if step % 5 == 4:
            table.evict()
    popped, known = table.pop_evicted(), table.key_statistics(universe)
    statistics = table.statistics()
    add_up(statistics)
    assert statistics["evicted"] > num_keys / 20
    counts = [popped["frequencies"], list(statistics.values())]
    return [*table.export()[:2], *known, popped["keys"], popped["rows"], *counts]


def test_threads_and_order_show_nowhere():
    policy = {"filter_freq": 2, "score": "lfu", "steps_to_live": 9, "evicted_buffer": 3000}
    states = []
    for num_threads, orders in ((1, None), (4, None), (3, np.random.default_rng(3))):
        _core.set_num_threads(num_threads)
        table = make(_core, 9000, {**policy, "max_waiting": 12_000})
        states.append(large_run(table, 40_000, 6000, 14, orders))
        statistics = table.statistics()
        assert min(statistics["evicted"], statistics["size"], statistics["forgotten"]) > 3000
        assert statistics["dropped"] == statistics["evicted"] - 3000
        for got, want in zip(states[-1], states[0], strict=True):
            np.testing.assert_array_equal(got, want)


# ---- Bloom filters ----


def bloom(core, max_keys, probability, freq=3, **kwargs):
    policy = {"filter_freq": freq, "bloom_max_keys": max_keys, "bloom_probability": probability}
    return make(core, 0, {**policy, **kwargs})


def test_a_roomy_bloom_filter_counts_exactly(core):
    table, model = bloom(core, 5000, 1e-6), Model(INITIAL, 0, {"filter_freq": 3})
    rng = np.random.default_rng(6)
    for _ in range(400):
        keys = np.unique(rng.integers(0, 1000, 12))
        rows, _ = table.find_or_insert(keys)
        assert (rows == model.lookup(keys.tolist())).all()
    present, frequencies, _ = table.key_statistics(np.arange(1000))
    found = [model.seen(key) for key in range(1000)]
    assert present.tolist() == [seen[0] for seen in found]
    assert frequencies.tolist() == [seen[1] for seen in found]


def test_a_crowded_bloom_filter_counts_too_often_and_stops_at_its_largest_value(core):
    """A counter that many keys share would overflow long before the keys get their rows."""
    table, keys = bloom(core, 40, 0.3, freq=255, bloom_counter_bits=8), np.arange(60)
    for _ in range(250):
        table.observe(keys)
    present, frequencies, _ = table.key_statistics(keys)
    assert (frequencies >= 250).all()
    assert present.any() and not present.all()  # some came early
    for _ in range(5):
        table.observe(keys)
    assert table.size == 60


@pytest.mark.parametrize("probability", [0.2, 0.02])
def test_false_positives_are_as_many_as_asked_for(probability):
    table = bloom(_core, 4000, probability, freq=2)
    table.observe(np.arange(4000))
    _, frequencies, _ = table.key_statistics(np.arange(10_000, 90_000))
    assert 0.8 * probability < np.mean(frequencies > 0) < 1.25 * probability


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_counters_have_the_width_asked_for(core, bits):
    plain, filtered = make(core), bloom(core, 100_000, 0.01, freq=200, bloom_counter_bits=bits)
    counters = -100_000 * np.log(0.01) / np.log(2) ** 2
    extra = filtered.stats()["bytes"] - plain.stats()["bytes"]
    assert counters * bits / 8 <= extra < counters * bits / 8 + 5000
    for _ in range(300):
        filtered.observe([5])
    assert filtered.key_statistics([5])[1][0] == 300  # got its row at 200, and counts on
    assert filtered.statistics()["refused"] == 199


# ---- optimizer state ----


@pytest.mark.parametrize(
    "rule", [("adam", {}), ("adam", {"weight_decay": 0.1}), ("adagrad", {}), ("ftrl", {})]
)
def test_evicted_rows_are_up_to_date_and_leave_nothing_behind(core, rule):
    """Beside a plain table from which the test itself erases what was evicted."""
    name, options = rule
    table, plain = make(core, 8, {"score": "lru", "evicted_buffer": 100}), make(core)
    rng, evicted = np.random.default_rng(5), 0
    for step in range(1, 61):
        keys = np.unique(rng.integers(0, 14, 4))
        grads = rng.normal(size=(len(keys), DIM)).astype(np.float32)
        table.observe(keys)
        popped = table.pop_evicted()
        if len(popped["keys"]):
            held, rows, slots = plain.export()
            where = np.searchsorted(held, popped["keys"])
            assert (held[where] == popped["keys"]).all()
            np.testing.assert_allclose(popped["rows"], rows[where], atol=1e-6)
            slot_rows = np.concatenate([slots[n] for n in popped["slot_names"]], axis=1)[where]
            np.testing.assert_allclose(popped["slot_rows"], slot_rows, atol=1e-6)
            assert plain.erase(popped["keys"]) == len(popped["keys"])
            evicted += len(popped["keys"])
        plain.find_or_insert(keys)
        for each in (table, plain):
            core.apply_gradients(each, name, 0.1, step, keys, grads, **options)
        # Exporting brings all rows up: both tables do so in the same steps.
        if len(popped["keys"]):
            table.export()
    assert evicted > 30
    (keys, rows, slots), (expected_keys, expected_rows, expected) = table.export(), plain.export()
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_allclose(rows, expected_rows, atol=1e-6)
    for slot, values in expected.items():
        np.testing.assert_allclose(slots[slot], values, atol=1e-6)


def test_rows_buffered_before_an_optimizer_came(core):
    table = make(core, 2, {"score": "lru", "evicted_buffer": 10})
    table.observe([1, 2])
    table.observe([3])
    ones = np.ones([1, DIM], np.float32)
    core.apply_gradients(table, "adagrad", 0.1, 1, [3], ones, initial_accumulator=0.5)
    table.observe([4])
    table.observe([5])
    popped = table.pop_evicted()
    assert popped["keys"].tolist() == [1, 2, 3]
    assert popped["slot_names"] == ["accumulator"]
    assert popped["slot_rows"].tolist() == [[0.5] * DIM, [0.5] * DIM, [1.5] * DIM]


@pytest.mark.parametrize("keys_are_unique", [True, False])
def test_gradients_without_a_row_are_dropped_and_counted(core, keys_are_unique):
    table = make(core, 0, {"filter_freq": 2})
    table.observe([1, 2])
    table.observe([1])
    keys = [1, 2, 3] if keys_are_unique else [1, 2, 2, 3]
    grads = np.ones([len(keys), DIM], np.float32)
    core.apply_gradients(table, "sgd", 1.0, 1, keys, grads, keys_are_unique=keys_are_unique)
    keys, rows, _ = table.export()
    assert keys.tolist() == [1]
    np.testing.assert_array_equal(rows[0], INITIAL[1] - 1)
    assert table.statistics()["dropped_gradients"] == 2  # keys 2 and 3


# ---- clear and errors ----


def test_a_cleared_table_is_as_new(core):
    table = make(core, 3, {"filter_freq": 2, "score": "lfu", "evicted_buffer": 2})
    for keys in ([1, 2, 3], [1, 2, 3], [4, 5], [4, 5]):
        table.observe(keys)
    assert table.statistics()["evicted"] == 2
    table.clear()
    assert set(table.statistics().values()) == {0}
    assert table.key_statistics([1, 4])[1].tolist() == [0, 0]
    assert len(table.pop_evicted()["keys"]) == 0
    table.observe([1])
    assert table.statistics()["refused"] == 1


@pytest.mark.parametrize(
    "capacity, policy, message",
    [
        (0, {"filter_freq": -1}, "`filter_freq` must not be negative. Received: -1"),
        (0, {"score": "lru"}, "positive `max_capacity`. Received: 0"),
        (9, {"score": "fifo"}, "'lru', 'lfu', 'custom'. Received: 'fifo'"),
        (0, {"bloom_max_keys": 9, "bloom_probability": 1.0}, "`bloom_probability` must be in"),
        (0, {"bloom_max_keys": 9, "bloom_counter_bits": 12}, "`bloom_counter_bits` must be"),
        (
            *(0, {"bloom_max_keys": 9, "bloom_counter_bits": 8, "filter_freq": 256}),
            "`filter_freq` must be a number that `bloom_counter_bits` bits can hold",
        ),
        (0, {"steps_to_live": -2}, "`steps_to_live` must not be negative"),
        (0, {"evicted_buffer": -2}, "`evicted_buffer` must not be negative"),
        (0, {"no_permission": float("nan")}, "`no_permission` must be finite"),
        (0, {"age": 1}, "`policy` has no field 'age'"),
    ],
)
def test_policies_out_of_range(core, capacity, policy, message):
    with pytest.raises(ValueError, match=message):
        make(core, capacity, policy)


def test_errors_of_calls(core):
    plain, table = make(core), make(core, 0, {"record": True})
    assert not plain.keeps_records and table.keeps_records
    with pytest.raises(ValueError, match="needs a table with an admission or eviction policy"):
        plain.statistics()
    with pytest.raises(ValueError, match="use_hashtable"):
        make(core, 9, {"record": True}, use_hashtable=False)
    with pytest.raises(ValueError, match="custom score"):
        table.assign_scores([1], [1])
    with pytest.raises(ValueError, match="`scores` must h"):
        make(core, 9, {"score": "custom"}).assign_scores([1, 2], [1])
    with pytest.raises(ValueError, match="`step` must be in"):
        table.set_step(-1)


# ---- a bound on waiting keys ----


def test_memory_of_waiting_keys_stays_flat():
    table, sizes = make(_core, 1000, {"filter_freq": 2, "score": "lru", "max_waiting": 1000}), []
    for step in range(400):
        table.observe(np.arange(step * 500, step * 500 + 500))
        sizes.append(table.stats()["bytes"])
    assert table.statistics()["waiting"] <= 1000
    assert max(sizes) < 300_000  # 200,000 keys would take 8 MB
