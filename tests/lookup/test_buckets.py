"""Keys in buckets, as `place` puts them there and as they change: each is in one place, its own."""

import numpy as np
import pytest

from sok_like.lookup import buckets
from sok_like.lookup.buckets import NoRoom, Placement

RANDOM = np.random.default_rng(0)
CASES = {
    "none": np.zeros(0, np.int64),
    "one": np.array([-(2**63)]),
    "first_ints": np.arange(17),
    "extreme": np.array([-(2**63), -1, 0, 2**63 - 1]),
    "fields": (np.arange(20_000) % 26 << 40) + np.arange(20_000) // 26,
    "random": np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 50_000)),
}


def placed_for(keys, room=0):
    layout = buckets.layout_for(max(room, len(keys)))
    return buckets.place(keys, layout, 0, layout.num_buckets)


@pytest.mark.parametrize("case", CASES)
def test_each_key_is_in_one_of_its_two_buckets(case):
    keys = CASES[case]
    placed = placed_for(keys)
    pair = buckets.choices(keys, placed.layout)
    for i, key in enumerate(keys[:2000]):
        (slot,) = np.flatnonzero(((placed.keys == key) & placed.is_taken).ravel())
        assert slot // buckets.SLOTS in (pair[0][i], pair[1][i])
    assert sorted(placed.keys[placed.is_taken]) == sorted(keys) and placed.num_keys == len(keys)
    starts = placed.starts()
    assert (np.diff(starts) == placed.counts[:-1]).all() and not starts[0]
    assert (pair[0] != pair[1]).all()
    bucket, slot = np.nonzero(~placed.is_taken)  # whose content no lookup seeks there
    assert len(bucket)
    pair = buckets.choices(placed.keys[bucket, slot], placed.layout)
    assert (pair[0] != bucket).all() and (pair[1] != bucket).all()


def test_ranks_place_parts_of_the_index_of_one_rank():
    keys = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 300_000))
    whole = placed_for(keys)
    layout = whole.layout
    assert layout.num_parts == 11 and layout.width == 4096
    for world_size in (2, 3, 16):  # of 16 ranks 5 place nothing
        RANDOM.shuffle(keys)
        ranks, ends = layout.ranks_of(keys, world_size), [0]
        for rank in range(world_size):
            begin, end = layout.range_of(rank, world_size)
            assert begin == ends[-1]
            ends.append(end)
            placed = buckets.place(keys[ranks == rank], layout, begin, end)
            assert placed.begin == begin and placed.num_keys == np.count_nonzero(ranks == rank)
            np.testing.assert_array_equal(placed.keys, whole.keys[begin:end])
            np.testing.assert_array_equal(placed.counts, whole.counts[begin:end])
        assert ends[-1] == layout.num_buckets
        assert np.count_nonzero(np.diff(ends)) == min(world_size, layout.num_parts)


def test_every_layout_has_contents_for_free_slots():
    for width in (8, 16, 64, 2048):
        for parts in (1, 2, 7):
            for salt in (buckets.layout_for(0).salt, 5, -(2**62)):
                layout = buckets.Layout(parts, width, salt)
                found = buckets.fillers(layout, 0, layout.num_buckets)
                numbers = np.arange(layout.num_buckets)
                pair = buckets.choices(found, layout)
                assert (pair[0] != numbers).all() and (pair[1] != numbers).all()
                part = slice(layout.width * (parts - 1), layout.num_buckets)
                np.testing.assert_array_equal(
                    buckets.fillers(layout, part.start, part.stop), found[part]
                )


@pytest.mark.parametrize("count, most", [(120_000, 10.7), (10**6, 10.1), (10**9, 9.6)])
def test_the_index_of_a_large_table_takes_about_ten_bytes_per_key(count, most):
    layout = buckets.layout_for(count)
    assert count <= layout.num_buckets * buckets.SLOTS * buckets.LOAD
    assert layout.num_buckets * (8 * buckets.SLOTS + 4) / count < most


def test_layouts_of_small_tables_are_one_part_of_a_power_of_two():
    for count, width in ((0, 8), (1, 8), (57, 8), (58, 16), (115, 16), (116, 32), (14_745, 2048)):
        assert buckets.layout_for(count)[:2] == (1, width)
    assert buckets.layout_for(14_746)[:2] == (2, 2048)


def test_keys_made_up_to_collide_are_placed_with_another_salt():
    keys = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 400_000))
    layout = buckets.layout_for(40)
    ours, theirs = buckets.choices(keys, layout)
    same = keys[(ours == 0) & (theirs == 1)][:40]  # 40 keys for 16 slots
    assert buckets.place(same, layout, 0, 8) is None
    placed = buckets.place(same, buckets.layout_for(40, 1), 0, 8)
    assert sorted(placed.keys[placed.is_taken]) == same.tolist()


# ---- changes of a served table ----

KEYS = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 9_000))
RANDOM.shuffle(KEYS)
NONE = KEYS[:0]


class Served:
    """The arrays of a server, which only copies what it is given."""

    def __init__(self, placed, placement):
        self.keys, self.numbers = placed.keys.copy(), placement.numbers().copy()
        self.layout = placed.layout

    def copy(self, changed):
        self.keys[changed["buckets"]] = changed["keys"]
        self.numbers[changed["slots"]] = changed["numbers"]

    def rows(self, keys):
        """The row of each key, -1 if it is absent; fails if it is there twice."""
        pair = np.stack(buckets.choices(keys, self.layout), 1)
        same = (self.keys[pair] == keys[:, None, None]).reshape(len(keys), 2 * buckets.SLOTS)
        assert (same.sum(1) <= 1).all()
        at = same.argmax(1)
        slot = pair[np.arange(len(keys)), at // buckets.SLOTS] * buckets.SLOTS + at % buckets.SLOTS
        return np.where(same.any(1), self.numbers[slot], -1)


def made(count, room):
    placed = placed_for(KEYS[:count], room)
    placement = Placement(placed, 0, room)
    served = Served(placed, placement)
    return placement, served, dict(zip(KEYS, served.rows(KEYS[:count]).tolist(), strict=False))


@pytest.mark.parametrize("count", [0, 1, 2_000])
def test_a_server_that_copies_the_changes_finds_each_key(count):
    placement, served, rows = made(count, 5_000)
    for step in range(60):
        present = np.array(list(rows), np.int64)
        gone = RANDOM.choice(present, min(len(present), 150), replace=False)
        new = RANDOM.choice(KEYS, 250, replace=False)
        new = new[~np.isin(new, gone)]
        before = dict(rows)
        found, removed = placement.change(new, np.r_[gone, KEYS[~np.isin(KEYS, present)][:9]])
        assert removed == len(gone)
        assert set(placement.freed()) == {rows[key] for key in gone} - {*found}
        for key in gone:
            del rows[key]
        for key, row in zip(new, found.tolist(), strict=True):
            assert rows.get(key, row) == row  # a present key keeps its row
            rows[key] = row
        if step % 3 == 0:
            placement.undo()
            rows = before
        served.copy(placement.changed())
        placement.keep()
        assert len(set(rows.values())) == len(rows) == placement.size
        wanted = [rows.get(key, -1) for key in KEYS]
        np.testing.assert_array_equal(served.rows(KEYS), wanted)


def test_room_may_be_filled_to_the_last_row():
    placement, served, _ = made(2_000, 4_000)
    for at in range(2_000, 4_000, 50):
        placement.change(KEYS[at : at + 50], NONE)
        served.copy(placement.changed())
        placement.keep()
    rows = served.rows(KEYS)
    assert sorted(rows[:4_000]) == list(range(4_000)) and (rows[4_000:] == -1).all()
    with pytest.raises(NoRoom, match="4001 keys, and room for 4000"):
        placement.change(KEYS[3_990:4_001], NONE)
    assert not len(placement.changed()["slots"])
    placement.change(KEYS[3_990:4_001], KEYS[:1])
    served.copy(placement.changed())
    assert served.rows(KEYS[:1]) == -1 and served.rows(KEYS[4_000:4_001]) == rows[0]


def test_keys_that_are_made_up_to_collide_have_no_room_and_change_nothing():
    placement, served, _ = made(0, 1_000)
    keys = np.arange(3 * 10**6)
    first, second = buckets.choices(keys, served.layout)
    same = keys[(first == first[0]) & (second == second[0])][:17]
    assert len(same) == 17
    with pytest.raises(NoRoom, match="of which 1 find no place"):
        placement.change(same, NONE)
    assert placement.size == 0 and not len(placement.changed()["slots"])
    placement.change(same[:16], NONE)
    served.copy(placement.changed())
    assert sorted(served.rows(same)) == [-1, *range(16)]


def test_others_are_the_keys_of_some_ranks_that_are_not_given():
    placement, _, _ = made(100, 200)
    others = placement.others(KEYS[:40], np.array([1]), 2)
    assert sorted(others) == sorted(k for k in KEYS[40:100] if k.astype(np.uint64) % 2 == 1)


def test_ranks_change_their_parts_of_one_index():
    layout = buckets.Layout(3, 256, 7)
    whole, rows = [], []
    for rank in range(2):
        begin, end = layout.range_of(rank, 2)
        mine = KEYS[layout.ranks_of(KEYS, 2) == rank]
        placed = buckets.place(mine[:400], layout, begin, end)
        whole.append((Placement(placed, 5_000 * rank, 5_000), placed, mine))
        rows.append(5_000 * rank + np.arange(400))
    served = Served(
        buckets.Buckets(np.concatenate([p.keys for _, p, _ in whole]), None, layout, 0), whole[0][0]
    )
    served.numbers = np.concatenate([placement.numbers() for placement, *_ in whole])
    for placement, _, mine in whole:
        found, removed = placement.change(mine[300:1000], mine[:50])
        assert removed == 50
        served.copy(placement.changed())
        np.testing.assert_array_equal(served.rows(mine[300:1000]), found)
    of_all = np.concatenate([served.rows(mine[50:1000]) for *_, mine in whole])
    assert (of_all >= 0).all() and len(np.unique(of_all)) == 1900
    assert (of_all[:950] < 5_000).all() and (of_all[950:] >= 5_000).all()
