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


@pytest.mark.parametrize("case", CASES)
def test_no_lookup_seeks_the_content_of_a_free_slot(case):
    placed = placed_for(CASES[case], room=len(CASES[case]) + 50)
    bucket, slot = np.nonzero(~placed.is_taken)
    assert len(bucket)
    pair = buckets.choices(placed.keys[bucket, slot], placed.layout)
    assert (pair[0] != bucket).all() and (pair[1] != bucket).all()


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
