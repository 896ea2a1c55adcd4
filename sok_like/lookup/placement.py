"""Where a served model has its keys, and where new ones go: an index in buckets that changes.

    bucket     | key | free | key | ...      as in buckets.py, with free slots anywhere
    numbers    |  4  |  -1  |  0  | ...      the row of each key; rows lie in any order

The exporter keeps this and decides; the server copies. A new key whose two buckets are full moves
another key to that key's other bucket. Rows never move: only the slot with the row's number does.
Each rank keeps the buckets that it placed (`Layout.range_of`), with rows of their own.
"""

from typing import Any

import numpy as np

from sok_like.lookup.buckets import SLOTS, Buckets, choices, fillers
from sok_like.table import keys as table_keys

_MOST_MOVES = 500  # rounds; at `buckets.LOAD` a new key needs less than ten moves


class NoRoom(ValueError):
    """More keys than there is room for."""


class Placement:
    """The keys of a served table that a rank places: at first `placed`, whose arrays change."""

    # Their rows are the first of `capacity` from `first_row` on, at most `LOAD` of the slots.

    def __init__(self, placed: Buckets, first_row: int, capacity: int, dtype: Any = np.int32):
        self.layout, self._begin = placed.layout, placed.begin
        self.capacity, self.size = capacity, placed.num_keys
        self._fillers = fillers(self.layout, self._begin, self._begin + len(placed.keys))
        self._keys = placed.keys
        starts = (first_row + placed.starts()).astype(dtype)
        numbers = starts[:, np.newaxis] + np.arange(SLOTS, dtype=dtype)
        self._numbers = np.where(placed.is_taken, numbers, dtype(-1))
        # The last one goes first.
        last = first_row + capacity - 1
        self._free: np.ndarray = np.arange(last, first_row + self.size - 1, -1, dtype=dtype)
        self._undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._kept = self.size, self._free
        self._random = np.random.default_rng(0)

    def numbers(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """The row in each slot of some of these buckets, `[num_slots]`; 0 for free slots."""
        return np.maximum(self._numbers[begin:end].reshape(-1), 0)

    def change(self, keys: np.ndarray, gone: np.ndarray) -> tuple[np.ndarray, int]:
        """Removes keys `gone`, and gives every one of `keys` (each once) that has none a row."""
        # Returns the rows of `keys` and the number of keys removed. Absent ones may be gone, too.
        removed = self._erase(self._find(gone))
        slots = self._find(keys)
        new = np.flatnonzero(slots < 0)
        if self.size + len(new) > self.capacity:
            count = self.size + len(new)
            self.undo()
            raise NoRoom(f"{count} keys, and room for {self.capacity}")
        split = len(self._free) - len(new)
        rows = np.empty(len(keys), self._numbers.dtype)
        rows[slots >= 0] = self._numbers.reshape(-1)[slots[slots >= 0]]
        rows[new] = self._free[split:][::-1]
        self._free = self._free[:split]
        self.size += len(new)
        self._insert(keys[new], rows[new])
        return rows, removed

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
        numbers = np.maximum(self._numbers.reshape(-1)[slots], 0)
        keys = self._keys[buckets]
        begin = first_bucket + self._begin
        slots, buckets = slots + begin * SLOTS, buckets + begin
        return {"slots": slots, "numbers": numbers, "buckets": buckets, "keys": keys}

    def freed(self) -> np.ndarray:
        """The rows that keys have left in the one change since `keep`, and no other has taken."""
        return self._free[len(self._kept[1]) :].astype(np.int64)

    def keep(self) -> None:
        """Makes all changes final."""
        self._undo, self._kept = [], (self.size, self._free)

    def undo(self) -> None:
        """Takes back all changes since `keep`."""
        for slots, keys, numbers in reversed(self._undo):
            self._keys.reshape(-1)[slots], self._numbers.reshape(-1)[slots] = keys, numbers
        self._undo, (self.size, self._free) = [], self._kept

    def _find(self, keys):
        """The slot of each key, -1 for absent ones."""
        buckets = np.stack(self._choices(keys), 1)
        same = (self._keys[buckets] == keys[:, np.newaxis, np.newaxis]).reshape(-1, 2 * SLOTS)
        at = np.argmax(same, 1)
        slot = buckets[np.arange(len(keys)), at // SLOTS] * SLOTS + at % SLOTS
        return np.where(same.any(1), slot, -1)

    def _choices(self, keys):
        return [buckets - self._begin for buckets in choices(keys, self.layout)]

    def _set(self, slots, keys, numbers):
        flat = self._keys.reshape(-1), self._numbers.reshape(-1)
        self._undo.append((slots, flat[0][slots], flat[1][slots]))
        flat[0][slots], flat[1][slots] = keys, numbers

    def _erase(self, slots):
        slots = np.unique(slots[slots >= 0])
        freed = self._numbers.reshape(-1)[slots]
        self._set(slots, self._fillers[slots // SLOTS], np.full(len(slots), -1, freed.dtype))
        self._free = np.concatenate([self._free, freed])
        self.size -= len(slots)
        return len(slots)

    def _insert(self, keys, numbers):
        """Puts absent keys into slots."""
        first, second = self._choices(keys)
        taken = [np.count_nonzero(self._numbers[choice] >= 0, axis=1) for choice in (first, second)]
        at = np.where(taken[1] < taken[0], second, first)
        for _ in range(_MOST_MOVES):
            if not len(keys):
                return
            order = np.argsort(at, kind="stable")
            keys, numbers, at = keys[order], numbers[order], at[order]
            buckets, begins, counts = np.unique(at, return_index=True, return_counts=True)
            here = np.repeat(np.arange(len(buckets)), counts)
            turn = np.arange(len(at)) - begins[here]
            is_taken = self._numbers[buckets] >= 0
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
        count = self.size
        self.undo()
        raise NoRoom(f"{count} keys, of which {len(keys)} find no place")
