"""Reads a dump with deltas: the base, then what changed since, in order.

    base | delta 1 | delta 2         each written by any number of ranks

For every key, the last dump that mentions it counts: it holds the key's row, or says that the key
is erased. A delta that is `whole` replaces all keys of the rank that wrote it. Keys are read range
by range, so memory does not grow with the dumps:

    base, rank 0    2 4 6 | 8 10 12 | 14        all keys between two bars are read together
    base, rank 1    1 3 5 | 7 9     | 13
    delta, rank 0   4     | 8       |

Some optimizers move rows outside of the batch (dense Adam, momentum, weight decay). Then a row that
no later delta holds has moved as well. The deltas log the steps, and the row goes through them
here, as a row in memory does when it is next read: with the same bits.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sok_like.runtime.native import libraries
from sok_like.saving.format import durable
from sok_like.saving.format.manifest import Dump
from sok_like.saving.format.progress import Progress
from sok_like.saving.format.shard_file import CHUNK_BYTES, ShardSource
from sok_like.table.content import TableShard, unread
from sok_like.table.keys import owners

_ROWS_AT_ONCE = 2**16
# Steps that deltas of few keys may log; a table logs fewer (cpp/core/cpu/change_log.cc).
_FREE_RUNS, _FREE_CATCH_UPS = 2**16, 2**12
_OPTIMIZER = re.compile(r"(\w+)\((.*)\)")
_WHOLE: tuple[str, dict[str, Any], np.ndarray] = "whole", {}, np.zeros([0, 3])  # as a log


class MergedDump:
    """What `rank` of `world_size` owns of base and deltas; `rest` is what belongs to no key."""

    def __init__(
        self, dumps: Sequence[Sequence[ShardSource]], rank: int, world_size: int, dim: int
    ):
        self._dumps, self._rank, self._world_size, self._dim = dumps, rank, world_size, dim
        self._rests = [[source.without_keys() for source in sources] for sources in dumps]
        num_keys = sum(source.num_keys for sources in dumps for source in sources)
        most = _FREE_RUNS + 4 * num_keys, _FREE_CATCH_UPS + num_keys
        for number, (sources, rests) in enumerate(zip(dumps, self._rests, strict=True)):
            for source, rest in zip(sources, rests, strict=True):
                if (rest.erased is not None) != (number > 0):
                    kind = "a delta" if number else "the base of a dump"
                    raise ValueError(f"{source.name} must be {kind}")
                counts = np.zeros([0]) if rest.steps is None else rest.steps[:, 0]
                received = len(counts), np.count_nonzero(counts == 0)
                if received[0] > most[0] or received[1] > most[1]:
                    text = "log at most {} runs of steps, {} of them of no step, for {} keys"
                    required = text.format(*most, num_keys)
                    raise durable.wrong(source.name, required, "{} and {}".format(*received))
        self._logs = [[_log_of(rest) for rest in rests] for rests in self._rests[1:]]
        self._owing = any(len(steps) for logs in self._logs for _, _, steps in logs)
        self.rest = self._without_keys()
        self.num_keys = self._count()

    def parts(self) -> Iterator[TableShard]:
        """Keys with their data; each key is in one part."""
        yield from map(self._part, itertools.chain.from_iterable(self._ranges()))

    def _part(self, position):
        number, source, begin, end, counts = position
        shard = source.part(begin, end)
        if not counts.all():
            by_key = {name: array[counts] for name, array in shard.by_key().items()}
            shard = dataclasses.replace(shard, **by_key)
        if self._owing:
            _bring_up(shard, number, self._logs, self._dim)
        if self.rest.records is None:
            shard.records = None
        elif shard.records is None:  # of a dump before the table had policies
            shard.records = np.zeros([len(shard.keys), 3], np.int64)
        return shard

    def sorted(self) -> TableShard:
        """All of a dump with deltas, for `write_shard`: keys ascend, and are read while written."""

        def read(_):
            for positions in self._ranges():
                shards = [self._part(position).by_key() for position in positions]
                if shards:
                    names = shards[0]
                    arrays = {n: np.concatenate([shard[n] for shard in shards]) for n in names}
                    order = np.argsort(arrays["keys"].view(np.uint64))
                    yield {name: array[order] for name, array in arrays.items()}

        arrays: dict[str, Any] = {
            name: unread((self.num_keys, *array.shape[1:]), array.dtype)
            for name, array in self.rest.by_key().items()
        }
        return dataclasses.replace(self.rest, **arrays, read=read)

    def _count(self):
        """Counts the keys, and finds out which slot variables and records they have."""
        count, first = 0, None
        for _, source, _, _, kept in itertools.chain.from_iterable(self._ranges()):
            count += int(kept.sum())
            slots = source.slot_names, source.slot_widths
            first = first or slots
            if slots != first:
                required, received = "have the same slot variables", f"{slots[0]} and {first[0]}"
                raise durable.wrong("All shards of a dump", required, received)
        rest, last = self.rest, max(self._dumps[-1], key=lambda source: source.num_keys)
        # Without a key of its own a rank has what the others have: it writes such a file, too.
        rest.slot_names, rest.slot_widths = first or (last.slot_names, last.slot_widths)
        rest.slot_rows = np.zeros([0, sum(rest.slot_widths)], np.float32)
        has_records = any(each.records is not None for each in self._rests[-1])
        rest.records = np.zeros([0, 3], np.int64) if has_records else None
        return count

    def _ranges(self):
        """By ascending range: parts of the sources, and which of their keys count, if any."""
        if len(self._dumps) == 1:  # every key counts
            yield self._all_positions()
            return
        erased = []  # by dump: this rank's keys that it marks as erased, sorted
        for rests in self._rests:
            lists = [rest.erased for rest in rests if rest.erased is not None]
            keys = np.concatenate([np.zeros([0], np.int64), *lists])
            erased.append(np.unique(keys[self._is_mine(keys)].view(np.uint64)))
        for bound, parts in _key_ranges(self._dumps):
            gone = []
            for number, keys in enumerate(erased):
                count = int(np.searchsorted(keys, bound, side="right"))
                gone.append(keys[:count])
                erased[number] = keys[count:]
            yield self._counting(parts, gone)

    def _all_positions(self):
        for source in self._dumps[0]:
            step = max(1, CHUNK_BYTES // max(1, source.key_bytes))
            for begin in range(0, source.num_keys, step):
                end = min(begin + step, source.num_keys)
                kept = np.ones(end - begin, bool)
                if self._world_size > 1:
                    kept = self._is_mine(source.keys(begin, end))
                if kept.any():
                    yield 0, source, begin, end, kept

    def _counting(self, parts, erased):
        """The keys of one range, by dump, that no later dump mentions."""
        later = np.zeros([0], np.uint64)  # keys of this rank that a later dump mentions
        # By later dump: its number of ranks, and the ranks whose shard replaces all earlier keys.
        replaced: list[tuple[int, list[int]]] = []
        for number in range(len(self._dumps) - 1, -1, -1):
            mentioned, rests = [later, erased[number]], self._rests[number]
            while parts[number]:  # frees the keys of a part after use
                source, begin, keys = parts[number].pop()
                kept = self._is_mine(keys)
                mentioned.append(keys[kept].view(np.uint64))
                if len(later) and len(keys):
                    sorted_keys = np.ascontiguousarray(keys).view(np.uint64)
                    at = np.minimum(np.searchsorted(sorted_keys, later), len(keys) - 1)
                    kept[at[sorted_keys[at] == later]] = False
                for world_size, ranks in replaced:
                    kept &= ~np.isin(owners(keys, world_size), ranks)
                if kept.any():
                    yield number, source, begin, begin + len(keys), kept
            if number:
                later = np.unique(np.concatenate(mentioned))
            whole = [rank for rank, rest in enumerate(rests) if rest.whole]
            if whole:
                replaced.append((len(rests), whole))

    def _is_mine(self, keys):
        return owners(keys, self._world_size) == self._rank

    def _without_keys(self):
        """The last dump without its keys."""
        # Counters of Bloom filters cannot be split by key. The maximum over all shards is right for
        # every key, if a little too large. At the same number of ranks each rank keeps its own.
        last, filters = self._rests[-1], self._rests[-1]
        if len(last) == self._world_size:
            filters = [last[self._rank]]
        waiting = [rest.waiting[self._is_mine(rest.waiting[:, 0])] for rest in last]
        counters = [rest.counters for rest in filters if len(rest.counters)]
        sizes = {len(each) for each in counters}
        if len(sizes) > 1:
            required, received = "have filters of the same size", f"{sorted(sizes)} counters"
            raise durable.wrong("All shards of a dump", required, received)
        nothing: Any = np.zeros([0], np.int64)
        rows: Any = np.zeros([0, self._dim], np.float32)
        return TableShard(
            *(nothing, rows, rows[:, :0], [], []),
            waiting=np.concatenate(waiting),
            counters=functools.reduce(np.maximum, counters) if counters else nothing,
            step=max(rest.step for rest in last),
            optimizer_step=max(rest.optimizer_step for rest in last),
            initial_row_scale=max(rest.initial_row_scale for rest in last),
        )


def content_of(
    dump: Dump, rank: int, world_size: int, dim: int, progress: str | None = None
) -> MergedDump:
    """What `rank` of `world_size` owns; checks all files first. `progress` names the call shown."""
    dumps = [dump, *dump.deltas]
    size = sum(durable.size(file) for each in dumps for file in each.files)
    with contextlib.closing(Progress(progress, size)) as shown:
        sources = [[each.open(n, dim, shown) for n in range(len(each.files))] for each in dumps]
    return MergedDump(sources, rank, world_size, dim)


def _log_of(shard):
    """Rule, options and steps, as `ReplayedSteps` takes them."""
    if shard.whole:
        return _WHOLE
    if not shard.optimizer:
        return "sgd", {}, shard.steps
    named = _OPTIMIZER.fullmatch(shard.optimizer)
    if named is None:
        raise durable.wrong("A delta", "name its optimizer", f"{shard.optimizer!r:.200}")
    pairs = (pair.split("=") for pair in named[2].split(", "))
    return named[1], {name: json.loads(value) for name, value in pairs}, shard.steps


def _bring_up(shard, number, logs, dim):
    """Takes the rows of dump number `number` through the steps of all later deltas."""
    different = []  # by delta, for each rank: the first one that has logged the same steps
    for shards in logs:
        comparable = [(rule, options, steps.tobytes()) for rule, options, steps in shards]
        different.append([comparable.index(log) for log in comparable])
    for alike in _by_path(shard.keys, different):
        key = shard.keys[alike][:1]
        segments = [shards[owners(key, len(shards))[0]] for shards in logs]
        # A whole delta has replaced all rows before it: they may be of an earlier optimizer, which
        # had slot variables that these rows lack.
        last = max((n for n, log in enumerate(segments) if log[0] == _WHOLE[0]), default=-1)
        segments[: last + 1] = [("sgd", {}, np.zeros([1, 3]))] * (last + 1)
        slots = shard.slot_names, shard.slot_widths
        rows, slot_rows = shard.rows[alike], shard.slot_rows[alike]
        libraries.core().ReplayedSteps(dim, *slots, segments).bring_up(number, rows, slot_rows)
        shard.rows[alike], shard.slot_rows[alike] = rows, slot_rows


def _by_path(keys, different):
    """Indices of keys that owe the same steps, a few of them at a time."""
    # Usually all ranks have logged the same steps. A rank that has exported its rows has not.
    paths = np.zeros(len(keys), np.int64)
    for first in different:
        if len(set(first)) > 1:
            paths = paths * len(first) + np.asarray(first)[owners(keys, len(first))]
            paths = np.unique(paths, return_inverse=True)[1]
    for path in np.unique(paths):
        alike = np.flatnonzero(paths == path)
        for begin in range(0, len(alike), _ROWS_AT_ONCE):
            yield alike[begin : begin + _ROWS_AT_ONCE]


def _key_ranges(dumps):
    """Ranges of ascending keys: the last key, and by dump each source with its begin and keys."""
    total = sum(source.num_keys * source.key_bytes for sources in dumps for source in sources)
    # A range has about two chunks with what belongs to its keys; a merge holds several copies.
    # In proportion to their sizes, so that all sources end at about the same time.
    share = min(1.0, 2 * CHUNK_BYTES / max(1, total))
    of_dumps = [[_KeyReader(source, share) for source in sources] for sources in dumps]
    readers = list(itertools.chain.from_iterable(of_dumps))
    last = np.uint64(2**64 - 1)
    while True:
        for reader in readers:
            reader.fill()
        bound = min((reader.keys[-1] for reader in readers if reader.has_more), default=last)
        runs = [[reader.take(bound) for reader in of_dump] for of_dump in of_dumps]
        yield bound, [[run for run in of_dump if len(run[2])] for of_dump in runs]
        if bound == last:
            return


class _KeyReader:
    """A source's keys that were read and not yet taken. The source checks that they ascend."""

    def __init__(self, source, share):
        self._source, self._step = source, max(1, int(source.num_keys * share))
        self._begin, self.keys = 0, np.zeros([0], np.uint64)

    @property
    def has_more(self):
        return self._begin + len(self.keys) < self._source.num_keys

    def fill(self):
        if not len(self.keys) and self.has_more:
            end = min(self._begin + self._step, self._source.num_keys)
            self.keys = self._source.keys(self._begin, end).view(np.uint64)

    def take(self, bound):
        count = int(np.searchsorted(self.keys, bound, side="right"))
        begin, taken = self._begin, self.keys[:count]
        self._begin, self.keys = begin + count, self.keys[count:].copy()  # frees the others
        return self._source, begin, taken.view(np.int64)
