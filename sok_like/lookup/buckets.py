"""Keys in buckets of eight: an index of fixed size that a lookup reads in one gather.

    key --mix--> 64 bits --> two buckets, one of which holds it

    bucket    | key | key | ... | key |     8 slots, free ones last
    start     row of the bucket's first key; the rows of its keys follow without gaps
    part      `width` buckets; both buckets of a key are in one part

A key whose bucket is full moves another key from there to that key's other bucket (cuckoo hashing
with buckets: Dietzfelbinger and Weidling, "Balanced allocation and dictionaries with tightly packed
constant size bins", 2007). Two choices of eight slots hold every key up to a load of 0.98, so
nothing overflows at `LOAD`. A free slot holds one of two numbers: one that no lookup seeks in this
bucket. So every number may be a key.

Parts are placed one by one, so each rank places some of them, and needs little memory beside the
index. Everything depends on the keys alone, so equal tables have equal indices.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

SLOTS = 8
# Keys per slot. 8 / 0.9 + 4 / 7.2 = 9.4 bytes per key; it takes about 20 rounds to place the keys.
LOAD = 0.9
# The first two are those of SplitMix64's finaliser (cpp/core/hash.h), the third is MurmurHash3's.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD)
# For words below 2**64, whose floats may be 2**64: `scaled` then gives less than the range.
_UNIT = (1 - 2.0**-40) * 2.0**-64
TRIES = 8  # salts
_ROUNDS = 200
# Of fewer buckets, all numbers might have one in common.
_LEAST_WIDTH = 8
# Buckets of a part, if there are several. The number of its keys varies by its root, so 2**11 have
# 0.98 of their slots taken once in 10**20 times; 2**14 take 1 MiB.
_WIDTHS = (2**11, 2**14)
_FEWEST_PARTS = 8  # until a part would have less than the least width
_CHUNK = 2**20  # keys for which choices are made at a time


class Layout(NamedTuple):
    """The buckets of a table."""

    num_parts: int
    width: int  # buckets of a part, a power of two
    salt: int  # int64, mixed into each key

    @property
    def num_buckets(self) -> int:
        """All buckets."""
        return self.num_parts * self.width

    @property
    def scales(self) -> tuple[float, float]:
        """What makes of a random word a key's first bucket, and the way to its second one."""
        return self.num_buckets * _UNIT, (self.width - 1) * _UNIT

    def parts_of(self, keys: np.ndarray) -> np.ndarray:
        """The part of each of the int64 keys `[num_keys]`, int32."""
        parts: np.ndarray = np.empty(len(keys), np.int32)
        for at in range(0, len(keys), _CHUNK):
            parts[at : at + _CHUNK] = choices(keys[at : at + _CHUNK], self)[0] // self.width
        return parts

    def ranks_of(self, keys: np.ndarray, world_size: int) -> np.ndarray:
        """The rank that places each of the int64 keys `[num_keys]`, int64."""
        return self.parts_of(keys).astype(np.int64) * world_size // self.num_parts

    def range_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """The buckets of a rank: its first one, and the one after its last."""
        first, behind = (-(-self.num_parts * r // world_size) for r in (rank, rank + 1))
        return first * self.width, behind * self.width


class Buckets(NamedTuple):
    """The keys of some parts."""

    keys: np.ndarray  # int64 `[num_buckets, SLOTS]`
    counts: np.ndarray  # int8 `[num_buckets]`, how many slots have a key
    layout: Layout
    begin: int  # the number of the first of these buckets

    @property
    def num_keys(self) -> int:
        """All keys in these buckets."""
        return int(self.counts.sum(dtype=np.int64))

    @property
    def is_taken(self) -> np.ndarray:
        """Whether a slot has a key, bool `[num_buckets, SLOTS]`."""
        return np.arange(SLOTS) < self.counts[:, np.newaxis]

    def starts(self) -> np.ndarray:
        """How many keys are in the buckets before each one, int64 `[num_buckets]`."""
        return np.cumsum(self.counts, dtype=np.int64) - self.counts


def layout_for(room: int, attempt: int = 0) -> Layout:
    """The layout with room for a number of keys; each attempt has another salt."""
    wanted = -int(-room // (SLOTS * LOAD))
    width = _WIDTHS[1]
    while width > _WIDTHS[0] and width * _FEWEST_PARTS > wanted:
        width //= 2
    if wanted <= width:
        width = max(_LEAST_WIDTH, 1 << (wanted - 1).bit_length())
    # Not 0: that would mix keys as the table in memory does.
    salt = ((attempt + 1) * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return Layout(max(1, -(-wanted // width)), width, salt)


def choices(keys: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The two buckets of each key, int64 `[num_keys]` each; they always differ."""
    # `stock_table.py` computes the same in TensorFlow, where a shift takes three steps of `scaled`.
    words: Any = (keys.view(np.uint64) ^ np.uint64(layout.salt % 2**64)) * np.uint64(FACTORS[0])
    words = (words ^ scaled(words, 2.0**-32).astype(np.uint64)) * np.uint64(FACTORS[1])
    first_scale, second_scale = layout.scales
    first = scaled(words, first_scale)
    # Another number below the width: it changes the place within the part.
    return first, first ^ (scaled(words * np.uint64(FACTORS[2]), second_scale) + 1)


def scaled(words: np.ndarray, scale: float) -> np.ndarray:
    """Words times a number below 1, rounded down, int64."""
    return (words.astype(np.float64) * scale).astype(np.int64)


def fillers(layout: Layout, begin: int, end: int) -> np.ndarray:
    """What free slots of these buckets hold, int64 `[end - begin]`: a number of other buckets."""
    numbers = np.arange(64)
    of_numbers = np.stack(choices(numbers, layout), 1)
    other = np.argmin(np.isin(of_numbers, of_numbers[0]).any(1))  # four buckets differ
    in_free_slots: Any = np.zeros(end - begin, np.int64)
    seekers = [bucket - begin for bucket in of_numbers[0] if begin <= bucket < end]
    in_free_slots[seekers] = numbers[other]
    return in_free_slots


def place(keys: np.ndarray, layout: Layout, begin: int, end: int) -> Buckets | None:
    """Puts all keys of the buckets from `begin` to `end` there; None if another salt is needed."""
    counts: np.ndarray = np.zeros(end - begin, np.int8)
    in_slots = np.repeat(fillers(layout, begin, end)[:, np.newaxis], SLOTS, 1)
    for at, of_part in _by_part(keys, layout, begin, end):
        of_part.sort()  # so that it does not matter which rank has sent which
        occupants = _occupants(*choices(of_part, layout), begin + at, layout.width)
        if occupants is None:
            return None
        taken = occupants >= 0
        in_slots[at : at + layout.width][taken] = of_part[occupants[taken]]
        counts[at : at + layout.width] = np.count_nonzero(taken, axis=1)
    return Buckets(in_slots, counts, layout, begin)


def _by_part(keys, layout, begin, end) -> Iterator[tuple[int, np.ndarray]]:
    """The first bucket of each part, from `begin` on, and its keys."""
    number = (end - begin) // layout.width
    small = np.uint16 if number <= 2**16 else np.int32  # NumPy sorts the former much faster
    parts = (layout.parts_of(keys) - begin // layout.width).astype(small)
    order = np.argsort(parts, kind="stable")
    begin = 0
    for part, count in enumerate(np.bincount(parts, minlength=number)):
        yield part * layout.width, keys[order[begin : begin + count]]
        begin += count


def _occupants(first, second, begin, num_buckets):
    """The key in each slot, counted from `begin` on, -1 for none; None if a key has no place."""
    occupants = np.full([num_buckets, SLOTS], -1, np.int32)
    counts = np.zeros(num_buckets, np.int8)
    target, both = (first - begin).astype(np.int32), (first ^ second).astype(np.int32)
    waiting = np.arange(len(first), dtype=np.int32)
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
