"""unique_with_inverse and merge_gradients against NumPy and dictionaries."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sok_like import _core

EXTREMES = [0, 1, -1, -2, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31 - 1]
keys_strategy = st.lists(
    st.one_of(st.sampled_from(EXTREMES), st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1)),
    max_size=300,
)


def check_route(core, keys, world_size):
    unique, inverse, offsets = core.unique_with_inverse(keys, world_size=world_size)
    assert unique.dtype == keys.dtype
    assert inverse.dtype == np.int32
    np.testing.assert_array_equal(unique[inverse], keys)
    np.testing.assert_array_equal(np.sort(unique), np.unique(keys))
    assert offsets[0] == 0 and offsets[-1] == len(unique) and len(offsets) == world_size + 1
    owners = unique.view(np.uint64) % np.uint64(world_size)
    np.testing.assert_array_equal(owners, np.repeat(np.arange(world_size), np.diff(offsets)))


@settings(deadline=None, max_examples=100)
@given(keys=keys_strategy, world_size=st.integers(1, 8))
def test_route_reconstructs_its_keys(keys, world_size):
    check_route(_core, np.array(keys, np.int64), world_size)
    check_route(_core, np.array(keys, np.int64).view(np.uint64), world_size)


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros(50_000, np.int64),
        np.arange(50_000),
        np.arange(50_000) * 2**40,
        np.arange(50_000)[::-1] << 48,
        np.arange(50_000) * 8,
    ],
    ids=["one_key", "dense", "high_bits", "top_bits", "one_owner"],
)
def test_regular_keys(keys):
    check_route(_core, keys.astype(np.int64), 1)
    check_route(_core, keys.astype(np.int64), 8)


@pytest.mark.parametrize("world_size", [1, 3])
def test_few_keys_keep_the_order_of_first_occurrence(core, world_size):
    keys = np.random.default_rng(1).integers(-20, 20, 300)
    check_route(core, keys, world_size)
    unique, _, offsets = core.unique_with_inverse(keys, world_size)
    for owner in range(world_size):
        mine = unique[offsets[owner] : offsets[owner + 1]].tolist()
        assert mine == sorted(mine, key=keys.tolist().index)


def test_world_size_is_checked():
    with pytest.raises(ValueError, match="`world_size` must be at least 1. Received: 0"):
        _core.unique_with_inverse(np.array([1]), world_size=0)


@settings(deadline=None, max_examples=50)
@given(keys=keys_strategy, dim=st.integers(1, 20))
def test_merge_sums_equal_keys(keys, dim):
    # Small integers as gradients: sums are exact in any order.
    grads = np.random.default_rng(len(keys)).integers(-50, 50, (len(keys), dim))
    expected = {}
    for key, grad in zip(keys, grads, strict=True):
        expected[key] = expected.get(key, 0) + grad
    unique, sums = _core.merge_gradients(np.array(keys, np.int64), grads.astype(np.float32))
    assert sorted(unique.tolist()) == sorted(expected)
    for key, total in zip(unique.tolist(), sums, strict=True):
        np.testing.assert_array_equal(total, expected[key])


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
