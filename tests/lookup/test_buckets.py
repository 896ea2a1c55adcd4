"""Keys in buckets: where `place` says that a key is, it is, and nowhere else."""

import numpy as np
import pytest

from sok_like.lookup import buckets

RANDOM = np.random.default_rng(0)
CASES = {
    "none": np.zeros(0, np.int64),
    "one": np.array([-(2**63)]),
    "first_ints": np.arange(17),
    "extreme": np.array([-(2**63), -1, 0, 2**63 - 1]),
    "fields": (np.arange(20_000) % 26 << 40) + np.arange(20_000) // 26,
    "random": np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 50_000)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_key_is_in_one_of_its_two_buckets(case):
    keys = CASES[case]
    placed = buckets.place(keys)
    assert len(set(placed.rows.tolist())) == len(keys)
    assert sorted(placed.rows.tolist()) == list(range(len(keys)))
    pair = buckets.choices(keys, len(placed.keys), placed.salt)
    found = [
        np.flatnonzero(((placed.keys == key) & placed.is_taken).ravel()) for key in keys[:2000]
    ]
    for i, slots in enumerate(found):
        (slot,) = slots
        bucket, position = divmod(slot, buckets.SLOTS)
        assert bucket in (pair[0][i], pair[1][i])
        assert placed.starts[bucket] + position == placed.rows[i]
    assert np.count_nonzero(placed.is_taken) == len(keys)
    assert not len(keys) or (pair[0] != pair[1]).all()


@pytest.mark.parametrize("case", CASES)
def test_no_lookup_seeks_the_content_of_a_free_slot(case):
    placed = buckets.place(CASES[case], room=len(CASES[case]) + 50)
    bucket, slot = np.nonzero(~placed.is_taken)
    assert len(bucket)
    pair = buckets.choices(placed.keys[bucket, slot], len(placed.keys), placed.salt)
    assert (pair[0] != bucket).all() and (pair[1] != bucket).all()


def test_every_number_of_buckets_has_contents_for_free_slots():
    for number in range(8, 200):
        for salt in (buckets.place(np.zeros(0, np.int64)).salt, 5, -(2**62)):
            found = buckets.fillers(number, salt)
            pair = buckets.choices(found, number, salt)
            assert (pair[0] != np.arange(number)).all() and (pair[1] != np.arange(number)).all()


def test_the_index_takes_under_ten_bytes_per_key():
    keys = CASES["random"]
    placed = buckets.place(keys)
    assert (placed.keys.nbytes + placed.starts.nbytes) / len(keys) < 9.6


def test_keys_made_up_to_collide_are_placed_with_another_salt():
    keys = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 400_000))
    first = buckets.place(keys[:40]).salt
    ours, theirs = buckets.choices(keys, 8, first)
    same = keys[(ours == 0) & (theirs == 1)][:40]  # 40 keys for 16 slots
    placed = buckets.place(same)
    assert len(placed.keys) == 8 and placed.salt != first
    assert sorted(placed.keys[placed.is_taken]) == same.tolist()
