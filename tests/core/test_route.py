"""unique_with_inverse and merge_gradients: order, and keys made up to be slow.

That no key is lost is in cpp/tests/route_test.cc.
"""

import time

import numpy as np
import pytest

from sok_like import _core

EXTREMES = [0, 1, -1, -2, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31 - 1]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("world_size", [1, 3])
def test_few_keys_keep_the_order_of_first_occurrence(core, world_size, dtype):
    keys = np.r_[np.random.default_rng(1).integers(-20, 20, 300), EXTREMES, EXTREMES].view(dtype)
    unique, inverse, offsets = core.unique_with_inverse(keys, world_size=world_size)
    assert unique.dtype == keys.dtype and inverse.dtype == np.int32
    np.testing.assert_array_equal(unique[inverse], keys)
    assert offsets[0] == 0 and offsets[-1] == len(unique) == len(np.unique(keys))
    owners = unique.view(np.uint64) % np.uint64(world_size)
    np.testing.assert_array_equal(owners, np.repeat(np.arange(world_size), np.diff(offsets)))
    for owner in range(world_size):
        mine = unique[offsets[owner] : offsets[owner + 1]].tolist()
        assert mine == sorted(mine, key=keys.tolist().index)


def test_merge_adds_in_order_of_position():
    big = np.array([[1e8], [1.0], [-1e8]], np.float32)
    # (1e8 + 1) - 1e8 is 0 in float32; any other order of these three gives 1.
    _, sums = _core.merge_gradients(np.array([4, 4, 4]), big)
    assert sums.tolist() == [[0.0]]
    _, sums = _core.merge_gradients(np.array([4, 4, 4]), big[[0, 2, 1]])
    assert sums.tolist() == [[1.0]]


def unmixed(values):
    """The keys that `Mix` of cpp/core/cpu/route.cc turns into these: run backwards."""
    inverse = np.uint64(pow(0xD6E8FEB86659FD93, -1, 2**64))
    with np.errstate(over="ignore"):
        keys = values ^ (values >> 32)
        keys = keys * inverse
        keys ^= keys >> 32
        keys = keys * inverse
        return keys ^ (keys >> 32)


def test_keys_made_up_to_share_a_place_take_no_longer():
    """Equal low bits of the mix: each would be compared with all before it."""
    crafted = unmixed(np.arange(200_000, dtype=np.uint64) << np.uint64(20))
    start = time.perf_counter()
    unique, inverse, _ = _core.unique_with_inverse(crafted)
    assert time.perf_counter() - start < 5  # 20 s without a multiplier of the process
    assert len(unique) == len(crafted)
    np.testing.assert_array_equal(unique[inverse], crafted)
