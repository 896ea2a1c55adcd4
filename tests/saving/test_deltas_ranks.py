"""Deltas of one and of two ranks, read by one and by two; the ranks' part is checks/deltas.py."""

import numpy as np
import pytest

from tests.checks.deltas import BATCH, DIM, ERASED, NUM_KEYS, batch

pytestmark = [pytest.mark.ranks]


def by_key(parts):
    """The content of all ranks, in the order of the keys."""
    keys = np.concatenate([part["keys"] for part in parts])
    order = np.argsort(keys)
    arrays = {"keys": keys[order]}
    for name in ("rows", "slot_rows", "records"):
        if name in parts[0]:
            arrays[name] = np.concatenate([part[name] for part in parts])[order]
    if "waiting" in parts[0]:
        waiting = np.concatenate([part["waiting"] for part in parts])
        arrays["waiting"] = waiting[np.argsort(waiting[:, 0])]
    arrays["steps"] = np.unique([part["optimizer_step"] for part in parts])
    return arrays


def check_same(after, before, what):
    assert after.keys() == before.keys() and len(before["keys"])
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], f"{what} {name}")


def dense_adam(initial, steps):
    """Rows of dense Adam in float64, by key: every row there is moves at every step."""
    rows, last = {}, None
    for step in range(steps):
        for key in ERASED.get(step, ()):
            rows.pop(key, None)
        keys = batch(step)
        assert len(keys) == BATCH
        for key in keys:
            rows.setdefault(key, [initial[key].astype(np.float64), np.zeros(DIM), np.zeros(DIM)])
        rate = 0.05 * 0.9 ** (step / 2)
        alpha = rate * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        counts = {key: np.sum(keys == key) for key in rows}
        for key, (row, m, v) in rows.items():
            gradient = 2 * row * counts[key]
            m += 0.1 * (gradient - m)
            v += 0.001 * (gradient**2 - v)
            row -= alpha * m / (np.sqrt(v) + 1e-7)
        last = rows
    return last


@pytest.mark.parametrize("kind", ["dense", "evicted"])
@pytest.mark.parametrize("writers", [1, 2])
def test_a_base_and_its_deltas_are_the_table_bit_for_bit(rank_results, kind, writers):
    found = rank_results(2, "deltas.chain")
    at = by_key([result[kind, writers]["at"] for result in found[:writers]])
    for readers in (1, 2):
        parts = [result[kind, writers, readers] for result in found[:readers]]
        check_same(by_key(parts), at, f"{kind} {writers} {readers}")
        for rank, part in enumerate(parts):
            assert (part["keys"].view(np.uint64) % np.uint64(readers) == rank).all()


@pytest.mark.parametrize("writers", [1, 2])
def test_they_are_what_dense_adam_computes(rank_results, writers):
    found = rank_results(2, "deltas.chain")[:writers]
    at = by_key([result["dense", writers]["at"] for result in found])
    rows = dense_adam(found[0]["dense", writers]["initial"], 8)
    assert at["keys"].tolist() == sorted(rows) and len(rows) < NUM_KEYS
    expected = np.stack([rows[key][0] for key in sorted(rows)])
    np.testing.assert_allclose(at["rows"], expected, rtol=1e-4, atol=1e-6)
    # Keys are missing that were there, and rows have moved that no delta holds.
    assert set(range(NUM_KEYS)) - set(at["keys"]) & set(batch(0))


@pytest.mark.parametrize("kind", ["dense", "evicted"])
def test_another_number_of_ranks_goes_on_and_compacts(rank_results, kind):
    found = rank_results(2, "deltas.chain")
    for writers in (1, 2):
        ranks = [result[kind, writers, "on"] for result in found[: 3 - writers]]
        for number in range(3):
            live = by_key([pairs[number][0] for pairs in ranks])
            read = by_key([pairs[number][1] for pairs in ranks])
            check_same(read, live, f"{kind} {writers} {number}")


def test_compact_of_a_table_whose_keys_are_all_of_one_rank(rank_results):
    for rank, found in enumerate(rank_results(2, "deltas.even_keys")):
        for on in ("", "_on"):
            assert found[f"read{on}"].keys() == found[f"wrote{on}"].keys()
            for name, value in found[f"wrote{on}"].items():
                np.testing.assert_array_equal(found[f"read{on}"][name], value, name)
        assert found["wrote"]["keys"].tolist() == [[2, 4, 6, 8, 10, 12], []][rank]
