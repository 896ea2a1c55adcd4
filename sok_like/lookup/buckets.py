"""Keys in buckets of eight: an index that a lookup reads in one gather, and how a server's changes.

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

If the served model changes, its exporter keeps a `Placement` and decides; the server copies:

    bucket    | key | free | key | ...      free slots anywhere
    numbers   |  4  |  -1  |  0  | ...      the row of each key; rows lie in any order

Rows never move: only the slot with the row's number does. Each rank keeps the buckets that it
placed (`Layout.range_of`), with rows of their own.
"""

from typing import Any, NamedTuple

import numpy as np

from sok_like.table import keys as table_keys

SLOTS = 8
# Keys per slot. 8 / 0.9 + 4 / 7.2 = 9.4 bytes per key. It takes about 20 rounds to place all keys,
# and less than ten to place a new one.
LOAD = 0.9
# The first two are those of SplitMix64's finaliser (cpp/core/hash.h), the third is MurmurHash3's.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD)
# For words below 2**64, whose floats may be 2**64: `scaled` then gives less than the range.
_UNIT = (1 - 2.0**-40) * 2.0**-64
TRIES = 8  # salts
_ROUNDS = 500
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
    num_parts = (end - begin) // layout.width
    small = np.uint16 if num_parts <= 2**16 else np.int32  # NumPy sorts the former much faster
    parts: Any = (layout.parts_of(keys) - begin // layout.width).astype(small)
    order = np.argsort(parts, kind="stable")
    bounds = np.cumsum(np.bincount(parts, minlength=num_parts))[:-1]
    counts: np.ndarray = np.zeros(end - begin, np.int8)
    in_slots = np.repeat(fillers(layout, begin, end)[:, np.newaxis], SLOTS, 1)
    # Of no parts, NumPy makes one: a rank may have no buckets.
    for number, of_part in zip(range(num_parts), np.split(order, bounds), strict=False):
        buckets = slice(number * layout.width, (number + 1) * layout.width)
        own = np.sort(keys[of_part])  # so that it does not matter which rank has sent which
        free: Any = np.full([layout.width, SLOTS], -1, np.int8)
        index = _Index(layout, begin + buckets.start, in_slots[buckets], free)
        if index._insert(own, np.zeros(len(own), np.int8), index._choices(own)[0]):
            return None
        counts[buckets] = np.count_nonzero(index._numbers >= 0, axis=1)
    return Buckets(in_slots, counts, layout, begin)


class _Index:
    """Slots `[num_buckets, SLOTS]` from bucket `begin` on: keys, and their numbers, -1 if free."""

    def __init__(self, layout, begin, keys, numbers):
        self.layout, self._begin = layout, begin
        self._keys, self._numbers = keys, numbers
        self._random = np.random.default_rng(0)

    def _choices(self, keys):
        return [buckets - self._begin for buckets in choices(keys, self.layout)]

    def _set(self, slots, keys, numbers):
        self._keys.reshape(-1)[slots], self._numbers.reshape(-1)[slots] = keys, numbers

    def _insert(self, keys, numbers, at):
        """Puts absent keys into slots, first those of buckets `at`; returns how many are left."""
        for _ in range(_ROUNDS):
            if not len(keys):
                break
            order = np.argsort(at.astype(np.int32), kind="stable")
            keys, numbers, at = keys[order], numbers[order], at[order]
            heads = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
            here = np.repeat(np.arange(len(heads)), np.diff(np.r_[heads, len(at)]))
            turn = np.arange(len(at)) - heads[here]
            is_taken = self._numbers[at[heads]] >= 0
            fits = turn < SLOTS - np.count_nonzero(is_taken, axis=1)[here]
            free_first = np.argsort(is_taken, axis=1, kind="stable")
            slots = at[fits] * SLOTS + free_first[here[fits], turn[fits]]
            self._set(slots, keys[fits], numbers[fits])
            keys, numbers, at = keys[~fits], numbers[~fits], at[~fits]
            # One of the keys left over at a bucket takes the place of a key there.
            takes = np.r_[True, at[1:] != at[:-1]][: len(at)]
            slots = at[takes] * SLOTS + self._random.integers(0, SLOTS, np.count_nonzero(takes))
            out = self._keys.reshape(-1)[slots], self._numbers.reshape(-1)[slots]
            self._set(slots, keys[takes], numbers[takes])
            keys = np.concatenate([keys[~takes], out[0]])
            numbers = np.concatenate([numbers[~takes], out[1]])
            # Each goes to its other bucket.
            at = np.sum(self._choices(keys), 0) - np.r_[at[~takes], at[takes]]
        return len(keys)


class NoRoom(ValueError):
    """More keys than there is room for."""


class Placement(_Index):
    """The keys of a served table that a rank places: at first `placed`, whose arrays change."""

    # Their rows are the first of `capacity` from `first_row` on, at most `LOAD` of the slots.

    def __init__(self, placed: Buckets, first_row: int, capacity: int, dtype: Any = np.int32):
        starts = (first_row + placed.starts()).astype(dtype)
        numbers = starts[:, np.newaxis] + np.arange(SLOTS, dtype=dtype)
        numbers = np.where(placed.is_taken, numbers, dtype(-1))
        super().__init__(placed.layout, placed.begin, placed.keys, numbers)
        self._fillers = fillers(self.layout, self._begin, self._begin + len(placed.keys))
        self.capacity, self.size = capacity, placed.num_keys
        # The last one goes first.
        last = first_row + capacity - 1
        self._free: np.ndarray = np.arange(last, first_row + self.size - 1, -1, dtype=dtype)
        self._undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._kept = self.size, self._free

    def numbers(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """The row in each slot of some of these buckets, `[num_slots]`; 0 for free slots."""
        return np.maximum(self._numbers[begin:end].reshape(-1), 0)

    def change(self, keys: np.ndarray, gone: np.ndarray) -> tuple[np.ndarray, int]:
        """Removes keys `gone`, and gives every one of `keys` (each once) that has none a row."""
        # Returns the rows of `keys` and the number of keys removed. Absent ones may be gone, too.
        slots = self._find(gone)
        slots = np.unique(slots[slots >= 0])
        freed, removed = self._numbers.reshape(-1)[slots], len(slots)
        self._set(slots, self._fillers[slots // SLOTS], np.full(removed, -1, freed.dtype))
        slots = self._find(keys)
        new = np.flatnonzero(slots < 0)
        self._free = np.concatenate([self._free, freed])
        self.size += len(new) - removed
        problem = f"{self.size} keys, and room for {self.capacity}"
        if self.size <= self.capacity:
            split = len(self._free) - len(new)
            rows = np.empty(len(keys), self._numbers.dtype)
            rows[slots >= 0] = self._numbers.reshape(-1)[slots[slots >= 0]]
            rows[new] = self._free[split:][::-1]
            self._free = self._free[:split]
            pair = self._choices(keys[new])
            taken = [np.count_nonzero(self._numbers[choice] >= 0, axis=1) for choice in pair]
            left = self._insert(keys[new], rows[new], np.where(taken[1] < taken[0], *pair[::-1]))
            if not left:
                return rows, removed
            problem = f"{self.size} keys, of which {left} find no place"
        self.undo()
        raise NoRoom(problem)

    def others(self, keys: np.ndarray, owners: np.ndarray, world_size: int) -> np.ndarray:
        """The keys that have a row, belong to one of the ranks `owners`, and are not in `keys`."""
        taken = self._numbers.reshape(-1) >= 0
        slots = self._find(keys)
        taken[slots[slots >= 0]] = False
        remaining = self._keys.reshape(-1)[taken]
        return remaining[np.isin(table_keys.owners(remaining, world_size), owners)]

    def changed(self, first_bucket: int = 0) -> dict[str, np.ndarray]:
        """`slots` that have changed since `keep`, and their `numbers`, 0 for free ones; `buckets`,
        and their `keys`. The table's first bucket has the number `first_bucket`.
        """
        slots = np.unique(np.concatenate([np.zeros(0, np.int64), *(u[0] for u in self._undo)]))
        buckets = np.unique(slots // SLOTS)
        begin = first_bucket + self._begin
        return {
            "slots": slots + begin * SLOTS,
            "numbers": np.maximum(self._numbers.reshape(-1)[slots], 0),
            "buckets": buckets + begin,
            "keys": self._keys[buckets],
        }

    def freed(self) -> np.ndarray:
        """The rows that keys have left in the one change since `keep`, and no other has taken."""
        return self._free[len(self._kept[1]) :].astype(np.int64)

    def keep(self) -> None:
        """Makes all changes final."""
        self._undo, self._kept = [], (self.size, self._free)

    def undo(self) -> None:
        """Takes back all changes since `keep`."""
        for change in reversed(self._undo):
            super()._set(*change)
        self._undo, (self.size, self._free) = [], self._kept

    def _set(self, slots, keys, numbers):
        old = self._keys.reshape(-1)[slots], self._numbers.reshape(-1)[slots]
        self._undo.append((slots, *old))
        super()._set(slots, keys, numbers)

    def _find(self, keys):
        """The slot of each key, -1 for absent ones."""
        buckets = np.stack(self._choices(keys), 1)
        same = (self._keys[buckets] == keys[:, np.newaxis, np.newaxis]).reshape(-1, 2 * SLOTS)
        at = np.argmax(same, 1)
        slot = buckets[np.arange(len(keys)), at // SLOTS] * SLOTS + at % SLOTS
        return np.where(same.any(1), slot, -1)
