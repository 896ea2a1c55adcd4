"""`_core.Table.assign` and inserting lookups on batches that mix present, new and repeated keys."""

import numpy as np
import pytest

from sok_like import _core
from tests.core.test_optimizers import CASES, TOLERANCE

NUM_OLD = 5000
SAMPLE = 64  # keys of a batch that decide whether all of it counts as new


@pytest.fixture(autouse=True)
def two_threads():
    _core.set_num_threads(2)


def mixed_keys(mix, num_keys):
    """Keys below NUM_OLD are present."""
    position = np.arange(num_keys)
    old, new = position % NUM_OLD, NUM_OLD + position
    stride = max(num_keys // SAMPLE, 1)
    sampled = (position % stride == 0) & (position < SAMPLE * stride)
    return {
        "sample_new_rest_present": np.where(sampled, new, old),
        "sample_present_rest_new": np.where(sampled, old, new),
        "sample_new_rest_repeated": np.where(sampled, new, NUM_OLD + position % SAMPLE * stride),
        "first_64_new": np.where(position < SAMPLE, new, old),
        "first_64_present": np.where(position < SAMPLE, old, new),
        "one_key": np.full(num_keys, NUM_OLD),
        "all_new": new,
        "all_present": old,
        "random": np.random.default_rng(num_keys).integers(0, 2 * NUM_OLD, num_keys),
    }[mix]


MIXES = [
    "sample_new_rest_present",
    "sample_present_rest_new",
    "sample_new_rest_repeated",
    "first_64_new",
    "first_64_present",
    "one_key",
    "all_new",
    "all_present",
    "random",
]


@pytest.mark.parametrize("num_keys", [1, 1023, 1024, 20_000])
@pytest.mark.parametrize("mix", MIXES)
def test_assign_against_dict(mix, num_keys):
    rng = np.random.default_rng(0)
    table = _core.Table("t", 3)
    expected = {}
    for keys in (np.arange(NUM_OLD), mixed_keys(mix, num_keys), mixed_keys(mix, num_keys)[::-1]):
        rows = rng.standard_normal((keys.size, 3)).astype(np.float32)
        table.assign(keys, rows)
        expected.update(zip(keys.tolist(), rows, strict=True))
    keys, rows, _ = table.export()
    assert keys.tolist() == sorted(expected)
    np.testing.assert_array_equal(rows, [expected[key] for key in keys.tolist()])


@pytest.mark.parametrize("num_keys", [1023, 1024, 20_000])
@pytest.mark.parametrize("mix", MIXES)
def test_find_or_insert_against_dict(mix, num_keys):
    rng = np.random.default_rng(0)
    table = _core.Table("t", 3, seed=3)
    old_rows = rng.standard_normal((NUM_OLD, 3)).astype(np.float32)
    table.assign(np.arange(NUM_OLD), old_rows)
    keys = mixed_keys(mix, num_keys)
    expected = table.initial_rows(keys)
    expected[keys < NUM_OLD] = old_rows[keys[keys < NUM_OLD]]
    rows, inserted = table.find_or_insert(keys)
    np.testing.assert_array_equal(rows, expected)
    first = np.zeros(num_keys, bool)
    first[np.unique(keys, return_index=True)[1]] = True
    np.testing.assert_array_equal(inserted, first & (keys >= NUM_OLD))
    np.testing.assert_array_equal(table.find(keys)[0], expected)
    np.testing.assert_array_equal(table.export()[0], np.union1d(np.arange(NUM_OLD), keys))


@pytest.mark.parametrize("mix", MIXES)
def test_thread_count_does_not_show(mix):
    results = []
    for num_threads in (1, 2, 5):
        _core.set_num_threads(num_threads)
        rng = np.random.default_rng(1)
        table = _core.Table("t", 7, seed=3)
        table.find_or_insert(np.arange(NUM_OLD))
        table.erase(rng.integers(0, NUM_OLD, 100))
        _core.apply_gradients(table, "adam", 0.1, 1, np.arange(500), np.ones((500, 7)))
        for _ in range(2):
            keys = mixed_keys(mix, 20_000)
            table.assign(keys, rng.standard_normal((keys.size, 7)))
            _core.apply_gradients(table, "adam", 0.1, 2, np.arange(9), np.ones((9, 7)))
        keys, rows, slots = table.export()
        results.append([keys, rows, slots["momentum"], slots["velocity"]])
    for parts in results[1:]:
        for mine, first in zip(parts, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)


@pytest.mark.parametrize("copies", [2, 3, 40])
@pytest.mark.parametrize("num_erased", [1, 10, 700])
def test_row_numbers_left_over_by_repeated_keys_are_used_once(num_erased, copies):
    table = _core.Table("t", 2)
    keys = np.arange(3000)
    table.assign(keys, np.zeros((3000, 2)))
    table.erase(keys[:num_erased])
    expected = dict.fromkeys(keys[num_erased:].tolist(), 0.0)
    for batch in range(1, 5):
        new = np.tile(np.arange(batch * 10_000, batch * 10_000 + 500), copies)
        table.assign(new, np.full((new.size, 2), batch))
        expected.update(dict.fromkeys(new.tolist(), float(batch)))
    keys, rows, _ = table.export()
    assert dict(zip(keys.tolist(), rows[:, 1].tolist(), strict=True)) == expected


@pytest.mark.parametrize("room", [63, 64, 65])
def test_close_to_max_capacity_a_new_sample_changes_nothing(room):
    table = _core.Table("t", 1, max_capacity=NUM_OLD + room)
    table.assign(np.arange(NUM_OLD), np.zeros((NUM_OLD, 1)))
    keys = mixed_keys("sample_new_rest_present", 4096)
    if room < 64:
        with pytest.raises(ValueError, match="max_capacity=5063.*64 new keys at size 5000"):
            table.assign(keys, np.ones((4096, 1)))
        assert table.size == NUM_OLD and not table.export()[1].any()
        return
    table.assign(keys, np.ones((4096, 1)))
    np.testing.assert_array_equal(table.find(keys)[0], np.ones((4096, 1)))
    assert table.size == NUM_OLD + 64


@pytest.mark.parametrize("room", [299, 300, 301])
def test_close_to_max_capacity_the_number_of_different_new_keys_decides(room):
    table = _core.Table("t", 1, max_capacity=NUM_OLD + room)
    table.assign(np.arange(NUM_OLD), np.zeros((NUM_OLD, 1)))
    position = np.arange(4096)
    keys = np.where(position % 7 == 0, position, NUM_OLD + position % 300)
    assert np.unique(keys[keys >= NUM_OLD]).size == 300
    before = table.export()
    rows = position[:, None].astype(np.float32)
    if room < 300:
        with pytest.raises(ValueError, match="max_capacity=5299.*300 new keys at size 5000"):
            table.assign(keys, rows)
        for mine, theirs in zip(table.export()[:2], before[:2], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        return
    table.assign(keys, rows)
    expected = np.zeros(NUM_OLD + 300)
    expected[keys] = position  # of equal keys the last
    np.testing.assert_array_equal(table.export()[1][:, 0], expected)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_assign_between_steps_follows_the_dense_table(case, use_hashtable):
    """Weights are as assigned at that step; moments stay, and later steps go on from there."""
    rule, options, make_oracle = CASES[case]
    num_rows, dim = 5000, 5
    table = _core.Table(
        "t",
        dim,
        initializer="uniform",
        a=-0.5,
        b=0.5,
        seed=3,
        use_hashtable=use_hashtable,
        max_capacity=num_rows,
    )
    oracle = make_oracle(table.find(np.arange(num_rows))[0], weight_decay=0.02)
    rng = np.random.default_rng(4)
    for step in range(1, 26):
        # Keys with gradients become rows early, the others are new when they are assigned.
        keys = rng.integers(0, 300, 40)
        grads = rng.normal(size=(40, dim)).astype(np.float32)
        _core.apply_gradients(table, rule, 0.03, step, keys, grads, weight_decay=0.02, **options)
        oracle.step(step, 0.03, keys, grads)
        if step % 5 == 0:
            # Large and nearly all new; then a mixture of present, new and repeated keys.
            if step == 15:
                keys = rng.permutation(np.r_[np.arange(1000, 2500), 1000:1200, 0:3])
            else:
                keys = rng.integers(0, 600 + 100 * step, 1500)
            rows = rng.standard_normal((keys.size, dim)).astype(np.float32)
            table.assign(keys, rows)
            last = {key: row for key, row in zip(keys.tolist(), rows, strict=True)}
            for key, row in last.items():
                oracle.w[key] = row
            np.testing.assert_array_equal(table.find(keys)[0], [last[k] for k in keys.tolist()])
    got = table.find(np.arange(num_rows))[0]
    np.testing.assert_allclose(got, oracle.w, atol=TOLERANCE.get(case, 2e-5), rtol=0)
    keys, rows, _ = table.export()
    np.testing.assert_allclose(rows, oracle.w[keys], atol=TOLERANCE.get(case, 2e-5), rtol=0)
