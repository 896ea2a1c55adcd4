"""Keys in buckets of eight: an index of fixed size that a lookup reads in one gather.

    key --mix--> 64 bits --> two buckets, one of which holds it

    bucket    | key | key | ... | key |     8 slots, free ones last
    start     row of the bucket's first key; the rows of its keys follow without gaps

A key whose bucket is full moves another key from there to that key's other bucket (cuckoo hashing
with buckets: Dietzfelbinger and Weidling, "Balanced allocation and dictionaries with tightly packed
constant size bins", 2007). Two choices of eight slots hold every key up to a load of 0.98, so
nothing overflows at `LOAD`. A free slot holds one of two numbers: one that no lookup seeks in this
bucket. So every number may be a key.

Everything depends on the keys alone, so equal tables have equal files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SLOTS = 8
# Keys per slot. 8 / 0.9 + 4 / 7.2 = 9.4 bytes per key; it takes about 20 rounds to place the keys.
LOAD = 0.9
# Factors of SplitMix64's finaliser, as in cpp/core/hash.h.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUNDS = 200
_TRIES = 8


class Buckets(NamedTuple):
    """The place of each key."""

    keys: np.ndarray  # int64 `[num_buckets, SLOTS]`
    starts: np.ndarray  # int32 or int64 `[num_buckets]`, the row of each bucket's first key
    # int64 `[num_keys]`, the row of each key, in the order in which keys were given.
    rows: np.ndarray
    salt: int  # int64, mixed into each key
    is_taken: np.ndarray  # bool `[num_buckets, SLOTS]`, whether the slot has a key


def choices(keys: np.ndarray, num_buckets: int, salt: int) -> tuple[np.ndarray, np.ndarray]:
    """The two buckets of each key, int64 `[num_keys]` each; they always differ."""
    hashed: Any = keys.view(np.uint64) ^ np.uint64(salt % 2**64)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    low, high = hashed & np.uint64(2**32 - 1), hashed >> np.uint64(32)
    first = (low * np.uint64(num_buckets)) >> np.uint64(32)
    step = (high * np.uint64(num_buckets - 1)) >> np.uint64(32)
    second = first + np.uint64(1) + step
    second -= np.where(second >= num_buckets, np.uint64(num_buckets), np.uint64(0))
    return first.astype(np.int64), second.astype(np.int64)


def fillers(num_buckets: int, salt: int) -> np.ndarray:
    """What free slots hold, int64 `[num_buckets]`: a number whose two buckets are others."""
    numbers = np.arange(64)
    of_numbers = np.stack(choices(numbers, num_buckets, salt), 1)
    other = np.argmin(np.isin(of_numbers, of_numbers[0]).any(1))  # four buckets differ
    found: Any = np.zeros(num_buckets, np.int64)
    found[of_numbers[0]] = numbers[other]
    return found


def place(keys: np.ndarray, room: int = 0) -> Buckets:
    """Puts keys into buckets.

    Args:
        keys: int64 `[num_keys]`, each once.
        room: Number of keys for which there is to be room, if it is larger.
    """
    # Of fewer buckets, all numbers might have one in common.
    num_buckets = max(8, -int(-max(len(keys), room) // (SLOTS * LOAD)))
    for attempt in range(_TRIES):
        # Not 0: that would mix keys as the table in memory does.
        salt = ((attempt + 1) * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
        occupants = _occupants(*choices(keys, num_buckets, salt), num_buckets)
        if occupants is not None:
            return _buckets(keys, occupants, salt)
    raise RuntimeError(
        f"{len(keys)} keys found no place in {num_buckets} buckets of {SLOTS}, with any of "
        f"{_TRIES} salts."
    )


def _occupants(first, second, num_buckets):
    """The key in each slot, `[num_buckets, SLOTS]`, -1 for none; None if a key has no place."""
    small = np.int32 if max(len(first), num_buckets) < 2**31 else np.int64
    occupants = np.full([num_buckets, SLOTS], -1, small)
    counts = np.zeros(num_buckets, np.int8)
    target, both = first.astype(small), (first ^ second).astype(small)
    waiting = np.arange(len(first), dtype=small)
    random = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        if not len(waiting):
            return occupants
        waiting = waiting[np.argsort(target[waiting], kind="stable")]
        at = target[waiting]
        heads = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
        lengths = np.diff(np.r_[heads, len(at)])
        slot = counts[at] + np.arange(len(at)) - np.repeat(heads, lengths)
        fits = slot < SLOTS
        occupants[at[fits], slot[fits]] = waiting[fits]
        counts[at[heads]] += np.add.reduceat(fits, heads, dtype=np.int8)
        left, at = waiting[~fits], at[~fits]
        # One of the keys left over at a bucket takes the place of a key there.
        takes = np.r_[True, at[1:] != at[:-1]][: len(at)]
        taken = at[takes], random.integers(0, SLOTS, np.count_nonzero(takes))
        waiting = np.concatenate([left[~takes], occupants[taken]])
        occupants[taken] = left[takes]
        target[waiting] ^= both[waiting]  # each goes to its other bucket
    return None if len(waiting) else occupants


def _buckets(keys, occupants, salt):
    taken = occupants >= 0
    counts = np.count_nonzero(taken, axis=1)
    starts = np.cumsum(counts) - counts
    order = occupants[taken]
    rows = np.empty(len(keys), np.int64)
    rows[order] = np.arange(len(keys))
    in_slots = np.repeat(fillers(len(occupants), salt)[:, np.newaxis], SLOTS, 1)
    in_slots[taken] = keys[order]
    kind = np.int32 if len(keys) < 2**31 else np.int64
    return Buckets(in_slots, starts.astype(kind), rows, salt, taken)
