"""Policies of `CudaTable`: against the model of tests/core in dicts, and against `_core.Table`."""

import numpy as np
import pytest

from sok_like import _core
from tests.core.test_policies import DIM, INITIAL, POLICIES, Runner, add_up, make
from tests.core.test_policy_details import steps_of_keys
from tests.cuda.policy_table import DeviceTable

# A device's table cannot count occurrences.
ON_DEVICES = [name for name in POLICIES if not POLICIES[name][1].get("count_occurrences")]


def test_occurrences_are_refused(cuda):
    with pytest.raises(ValueError, match="`count` must be 'lookups' for a table in device memory"):
        DeviceTable(cuda, 0, POLICIES["occurrences"][1])


def run_model(cuda, name, steps):
    runner = Runner(name, lambda capacity, policy: DeviceTable(cuda, capacity, policy))
    runner.run(steps, compare_every=100)
    counts = runner.model.counts
    assert counts["admitted"] > 10
    assert bool(counts["refused"]) == ("filter_freq" in POLICIES[name][1])
    assert bool(counts["evicted"]) == (name != "filter")
    add_up(runner.table.statistics())
    return runner


@pytest.mark.parametrize("name", ON_DEVICES)
def test_against_the_model(cuda, name):
    run_model(cuda, name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DEVICES)
def test_against_the_model_for_longer(cuda, name):
    runner = run_model(cuda, name, 25_000)
    if name != "all":
        assert bool(runner.failures) == (runner.model.capacity > 0)


def large_run(table):
    """The state of a table after lookups that evict and have mostly new keys."""
    rng = np.random.default_rng(2)
    for step in range(10):
        table.observe(rng.integers(0, 6_000, 900) * 0x9E3779B97F4A7C1 - 2**62)
        if step % 5 == 4:
            table.evict()
    popped = table.pop_evicted()
    keys, rows, _ = table.export()
    known = table.key_statistics(np.arange(6_000) * 0x9E3779B97F4A7C1 - 2**62)
    add_up(table.statistics())
    assert table.statistics()["evicted"] > 300
    return [keys, rows, *known, popped["keys"], popped["rows"], list(table.statistics().values())]


@pytest.mark.parametrize(
    "capacity, policy",
    [
        (500, {"filter_freq": 2, "score": "lfu", "steps_to_live": 9, "evicted_buffer": 200}),
        (1000, {"score": "lru", "evicted_buffer": 200}),
        (700, {"score": "lru", "filter_freq": 2, "bloom_max_keys": 3000, "bloom_counter_bits": 8}),
    ],
)
def test_large_lookups_are_those_of_the_cpu(cuda, capacity, policy):
    expected = large_run(make(capacity, policy))
    for got, want in zip(large_run(DeviceTable(cuda, capacity, policy)), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_bloom_filters_count_as_on_the_cpu_and_stop_at_their_largest_value(cuda, bits):
    policy = {"filter_freq": 255, "bloom_max_keys": 40, "bloom_probability": 0.3}
    policy["bloom_counter_bits"] = bits
    tables = make(0, policy), DeviceTable(cuda, 0, policy)
    rng = np.random.default_rng(6)
    for _ in range(300):
        keys = rng.integers(0, 60, 25)
        for table in tables:
            table.observe(keys)
    found = [table.key_statistics(np.arange(100)) for table in tables]
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)
    assert found[0][0].any() and not found[0][0].all()
    assert tables[0].statistics() == tables[1].statistics()


@pytest.mark.parametrize(
    "rule", [("adam", {}), ("adam", {"weight_decay": 0.1}), ("adagrad", {}), ("ftrl", {})]
)
def test_evicted_rows_are_up_to_date_and_leave_nothing_behind(cuda, rule):
    name, options = rule
    policy = {"score": "lru", "evicted_buffer": 100, "filter_freq": 2, "no_permission": 0.5}
    tables = make(8, policy), DeviceTable(cuda, 8, policy)
    num_popped = 0
    for step, keys, grads in steps_of_keys(60):
        reads, popped = [], []
        for table in tables:
            reads.append(table.find_or_insert(keys)[0])
            apply = getattr(table, "apply_gradients", None)
            if apply is None:
                _core.apply_gradients(table, name, 0.1, step, keys, grads, **options)
            else:
                apply(name, 0.1, step, keys, grads, **options)
            popped.append(table.pop_evicted())
        np.testing.assert_allclose(*reads, atol=1e-6)
        assert popped[0]["keys"].tolist() == popped[1]["keys"].tolist()
        assert popped[0]["slot_names"] == popped[1]["slot_names"]
        np.testing.assert_allclose(popped[0]["rows"], popped[1]["rows"], atol=1e-6)
        np.testing.assert_allclose(popped[0]["slot_rows"], popped[1]["slot_rows"], atol=1e-6)
        num_popped += len(popped[0]["keys"])
    assert num_popped > 20
    (keys, rows, slots), (device_keys, device_rows, device_slots) = (t.export() for t in tables)
    assert keys.tolist() == device_keys.tolist()
    np.testing.assert_allclose(device_rows, rows, atol=1e-6)
    for slot, values in slots.items():
        np.testing.assert_allclose(device_slots[slot], values, atol=1e-6)
    assert tables[0].statistics() == tables[1].statistics()
    assert tables[0].statistics()["dropped_gradients"] > 0


def test_rows_buffered_before_an_optimizer_came(cuda):
    table = DeviceTable(cuda, 2, {"score": "lru", "evicted_buffer": 10})
    table.observe([1, 2])
    table.observe([3])
    ones = np.ones([1, DIM], np.float32)
    table.apply_gradients("adagrad", 0.1, 1, [3], ones, initial_accumulator=0.5)
    table.observe([4])
    table.observe([5])
    popped = table.pop_evicted()
    assert popped["keys"].tolist() == [1, 2, 3]
    assert popped["slot_names"] == ["accumulator"]
    assert popped["slot_rows"].tolist() == [[0.5] * DIM, [0.5] * DIM, [1.5] * DIM]


@pytest.mark.parametrize("keys_are_unique", [True, False])
def test_gradients_without_a_row_are_dropped_and_counted(cuda, keys_are_unique):
    table = DeviceTable(cuda, 0, {"filter_freq": 2})
    table.observe([1, 2])
    table.observe([1])
    keys = [1, 2, 3] if keys_are_unique else [1, 2, 2, 3]
    grads = np.ones([len(keys), DIM], np.float32)
    table.apply_gradients("sgd", 1.0, 1, keys, grads, keys_are_unique=keys_are_unique)
    keys, rows, _ = table.export()
    assert keys.tolist() == [1]
    np.testing.assert_array_equal(rows[0], INITIAL[1] - 1)
    assert table.statistics()["dropped_gradients"] == 2  # keys 2 and 3


def test_row_numbers_of_keys_that_wait(cuda):
    table = DeviceTable(cuda, 0, {"filter_freq": 2, "no_permission": -2.5})
    table.observe([1, 2])
    table.observe([1])
    numbers = table.table.row_numbers(table.up([1, 2, 1]))
    rows = table.table.gather(numbers).get()
    assert rows.tolist() == [INITIAL[1].tolist(), [-2.5] * DIM, INITIAL[1].tolist()]
    table.table.row_numbers(table.up([2, 3]), insert=True)  # written, not looked up
    assert table.statistics()["written"] == 2
    assert table.statistics()["waiting"] == 0


def test_a_full_table_without_a_score_refuses_and_forgets_the_call(cuda):
    table = DeviceTable(cuda, 3, {"filter_freq": 2})
    table.observe([1, 2, 3, 4])
    before = table.statistics()
    with pytest.raises(ValueError, match="max_capacity=3"):
        table.observe([1, 2, 3, 4, 7])
    assert table.statistics() == before
    assert table.key_statistics([1, 4, 7])[1].tolist() == [1, 1, 0]
    table.observe([1, 2, 3])
    assert table.size == 3


def test_a_cleared_table_is_as_new(cuda):
    table = DeviceTable(cuda, 3, {"filter_freq": 2, "score": "lfu", "evicted_buffer": 2})
    for keys in ([1, 2, 3], [1, 2, 3], [4, 5], [4, 5]):
        table.observe(keys)
    assert table.statistics()["evicted"] == 2
    table.clear()
    assert set(table.statistics().values()) == {0}
    assert table.key_statistics([1, 4])[1].tolist() == [0, 0]
    assert len(table.pop_evicted()["keys"]) == 0
    table.observe([1])
    assert table.statistics()["refused"] == 1


def test_errors_of_calls(cuda):
    plain = DeviceTable(cuda)
    assert not plain.keeps_records
    with pytest.raises(ValueError, match="needs a table with an admission or eviction policy"):
        plain.statistics()
    table = DeviceTable(cuda, 0, {"record": True})
    assert table.keeps_records
    with pytest.raises(ValueError, match="custom score"):
        table.assign_scores([1], [1])
    with pytest.raises(ValueError, match="`scores` must"):
        DeviceTable(cuda, 9, {"score": "custom"}).assign_scores([1, 2], [1])
    with pytest.raises(ValueError, match="`step` must be in"):
        table.set_step(-1)
    with pytest.raises(ValueError, match="`policy` has no field 'age'"):
        DeviceTable(cuda, 0, {"age": 1})
