"""Reads the keys of several sorted sources range by range, to merge a dump and its deltas.

base, rank 0    2 4 6 | 8 10 12 | 14        all keys between two bars are read together,
base, rank 1    1 3 5 | 7 9     | 13        so memory does not grow with the dumps
delta, rank 0   4     | 8       |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sok_like.saving.format.shard_file import CHUNK_BYTES
from sok_like.saving.format.shard_reader import ShardSource


class Run(NamedTuple):
    """The keys of one source in one range."""

    source: int  # its number
    begin: int  # position of the first key
    keys: np.ndarray  # int64


def ranges(
    sources: Sequence[ShardSource], num_bytes: int = 2 * CHUNK_BYTES
) -> Iterator[tuple[np.uint64, list[Run]]]:
    """Ranges of keys in ascending order, by uint64 value; the keys of each source ascend.

    Yields the last key that belongs to a range, and the runs of the sources that have keys in it. A
    range has about `num_bytes` with what belongs to its keys; a merge holds several copies.
    """
    total = sum(source.num_keys * source.key_bytes for source in sources)
    # In proportion to their sizes, so that all sources end at about the same time.
    share = min(1.0, num_bytes / max(1, total))
    readers = [_Reader(source, share) for source in sources]
    last = np.uint64(2**64 - 1)
    while True:
        for reader in readers:
            reader.fill()
        bound = min((reader.keys[-1] for reader in readers if reader.has_more), default=last)
        runs = (Run(n, *reader.take(bound)) for n, reader in enumerate(readers))
        yield bound, [run for run in runs if len(run.keys)]
        if bound == last:
            return


class _Reader:
    """A source's keys that were read and not yet taken."""

    def __init__(self, source, share):
        self._source, self._step = source, max(1, int(source.num_keys * share))
        self._begin = self._end = 0
        self.keys = np.zeros([0], np.uint64)

    @property
    def has_more(self):
        return self._end < self._source.num_keys

    def fill(self):
        if len(self.keys) or not self.has_more:
            return
        end = min(self._end + self._step, self._source.num_keys)
        # Includes the key before them, which must be smaller.
        first = max(0, self._begin - 1)
        keys = self._source.keys(first, end).view(np.uint64)
        if not (keys[1:] > keys[:-1]).all():
            raise ValueError(f"{self._source.name} must have keys that ascend")
        self.keys, self._end = keys[self._begin - first :], end

    def take(self, bound):
        count = int(np.searchsorted(self.keys, bound, side="right"))
        begin, taken = self._begin, self.keys[:count]
        self._begin, self.keys = begin + count, self.keys[count:].copy()  # frees the others
        return begin, taken.view(np.int64)
