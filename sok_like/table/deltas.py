"""A dump with deltas, read: the base, and in order what changed since.

    base | delta 1 | delta 2         each by the ranks of its time, with any number of them

Of every key the last dump that mentions it counts: it holds the key's row, or says that the key is
erased. A delta that is `whole` stands for all keys of the rank that wrote it.

Where an optimizer moves rows outside of the batch (dense Adam, momentum, weight decay), a row that
no later delta holds has moved all the same. Its delta logs the steps, and the row goes through them
here, as the row of the live table does when it is next read: with the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sok_like.runtime import native
from sok_like.table import merged_keys
from sok_like.table.dump_file import Dump, is_mine
from sok_like.table.progress import Progress
from sok_like.table.shard_file import PIECE, Column, Shard
from sok_like.table.shard_reader import BY_KEY, ShardSource

_ROWS_AT_ONCE = 2**16
_OPTIMIZER = re.compile(r"(\w+)\((.*)\)")


class Content:
    """What `rank` of `world_size` owns of a dump and its deltas, read part by part.

    Args:
        dumps: The base and each delta in order, as the sources of its shards by rank.
        rank: Whose keys to read.
        world_size: Of how many ranks.
        dim: Row width.

    Attributes:
        rest: What does not go by key; its arrays by key are empty.
        num_keys: How many keys there are.

    Raises:
        ValueError: a base where a delta belongs, shards with different slot variables, or with
            filters of different sizes.
    """

    def __init__(
        self, dumps: Sequence[Sequence[ShardSource]], rank: int, world_size: int, dim: int
    ):
        self._dumps, self._rank, self._world_size, self._dim = dumps, rank, world_size, dim
        self._rests = [[source.without_keys() for source in sources] for sources in dumps]
        for number, (sources, rests) in enumerate(zip(dumps, self._rests, strict=True)):
            if any((rest.erased is not None) != (number > 0) for rest in rests):
                kind = "a delta" if number else "the base of a dump"
                raise ValueError(f"{sources[0].name} must be {kind}")
        self._logs = [[_log_of(rest) for rest in rests] for rests in self._rests[1:]]
        self._owing = any(len(steps) for logs in self._logs for _, _, steps in logs)
        self.rest = self._without_keys()
        self.num_keys = self._count()

    def parts(self) -> Iterator[Shard]:
        """Keys with all that goes with them; each key is in one part."""
        yield from map(self._part, self._positions())

    def _part(self, position):
        number, source, _, begin, end, kept = position
        shard = _selected(source.part(begin, end), kept)
        if self._owing:
            _bring_up(shard, number, self._logs, self._dim)
        if self.rest.records is None:
            shard.records = None
        return shard

    def sorted(self) -> Shard:
        """The whole of it for `write_shard`, with keys that ascend; it is read while it is written.

        Of a dump with deltas, whose keys ascend in each file.
        """
        arrays = {name: getattr(self.rest, name) for name in BY_KEY}
        columns: dict[str, Any] = {
            name: Column((self.num_keys, *array.shape[1:]), array.dtype, self._in_order(name))
            for name, array in arrays.items()
            if array is not None and (name == "keys" or array.shape[1])
        }
        if "slot_rows" not in columns:
            columns["slot_rows"] = np.zeros([self.num_keys, 0], np.float32)
        return dataclasses.replace(self.rest, **columns)

    def _in_order(self, name):
        """An array by key, in the order of the keys, whose next rows each call returns."""
        found = (getattr(shard, name) for shard in self._sorted_parts())
        left: list[np.ndarray] = []

        def part(begin, end, _):
            while sum(map(len, left)) < end - begin:
                left.append(next(found))
            rows = np.concatenate(left)
            left[:] = [rows[end - begin :]]
            return rows[: end - begin]

        return part

    def _sorted_parts(self):
        for positions in self._ranges():
            shards = [self._part(position) for position in positions]
            if not shards:
                continue
            order = np.argsort(np.concatenate([each.keys for each in shards]).view(np.uint64))
            rest, found = shards[0], {}
            for name in BY_KEY:
                arrays = [getattr(each, name) for each in shards]
                found[name] = None if arrays[0] is None else np.concatenate(arrays)[order]
            yield dataclasses.replace(rest, **found)

    def whole(self) -> Shard:
        """All parts together."""
        found, begin = dataclasses.replace(self.rest), 0
        for name in ("keys", "rows", "slot_rows", "records"):
            array = getattr(found, name)
            if array is not None:
                setattr(found, name, np.zeros([self.num_keys, *array.shape[1:]], array.dtype))
        for part in self.parts():
            end = begin + len(part.keys)
            found.keys[begin:end], found.rows[begin:end] = part.keys, part.rows
            found.slot_rows[begin:end] = part.slot_rows
            if found.records is not None:
                found.records[begin:end] = part.records
            begin = end
        return found

    def _count(self):
        """Keys; learns on the way which slots and records they have."""
        count, first, has_records = 0, None, True
        for _, source, rest, _, _, kept in self._positions():
            count += int(kept.sum())
            slots = source.slot_names, source.slot_widths
            first = first or slots
            if slots != first:
                raise ValueError(
                    "All shards of a dump must have the same slot variables. Received: "
                    f"{source.slot_names} and {first[0]}"
                )
            has_records &= rest.records is not None
        rest = self.rest
        rest.slot_names, rest.slot_widths = first or ([], [])
        rest.slot_rows = np.zeros([0, sum(rest.slot_widths)], np.float32)
        rest.records = np.zeros([0, 3], np.int64) if first and has_records else None
        return count

    def _positions(self):
        """Parts of the sources, and which of their keys count; only where there are some."""
        for positions in self._ranges():
            yield from positions

    def _ranges(self):
        """The same range by range: the keys of each are greater than those of the one before."""
        if len(self._dumps) == 1:  # every key counts
            yield self._all_positions()
            return
        numbered = [
            (number, source, rest)
            for number, sources in enumerate(self._dumps)
            for source, rest in zip(sources, self._rests[number], strict=True)
        ]
        erased = [self._erased(rests) for rests in self._rests]
        for bound, runs in merged_keys.ranges([source for _, source, _ in numbered]):
            parts: list[list[Any]] = [[] for _ in self._dumps]
            while runs:
                each, begin, keys = runs.pop()
                number, source, rest = numbered[each]
                parts[number].append((source, rest, begin, keys))
            gone = []
            for number, keys in enumerate(erased):
                count = int(np.searchsorted(keys, bound, side="right"))
                gone.append(keys[:count])
                erased[number] = keys[count:]
            yield self._counting(parts, gone)

    def _all_positions(self):
        for source, rest in zip(self._dumps[0], self._rests[0], strict=True):
            step = max(1, PIECE // max(1, source.key_bytes))
            for begin in range(0, source.num_keys, step):
                end = min(begin + step, source.num_keys)
                kept = self._is_mine(source.keys(begin, end))
                if kept.any():
                    yield 0, source, rest, begin, end, kept

    def _erased(self, rests):
        """The keys of this rank that a delta says are gone, sorted."""
        found = [rest.erased for rest in rests if rest.erased is not None]
        keys = np.concatenate([np.zeros([0], np.int64), *found])
        return np.unique(keys[self._is_mine(keys)].view(np.uint64))

    def _counting(self, parts, erased):
        """Of the keys of one range by dump, those that no later dump mentions."""
        later = np.zeros([0], np.uint64)  # keys of this rank that a later dump mentions
        # Of a later dump by so many ranks, those whose keys replace all that was there.
        replaced: list[tuple[int, list[int]]] = []
        for number in range(len(self._dumps) - 1, -1, -1):
            mentioned, rests = [later, erased[number]], self._rests[number]
            while parts[number]:  # a part's keys are freed with it
                source, rest, begin, keys = parts[number].pop()
                kept = self._is_mine(keys)
                mentioned.append(keys[kept].view(np.uint64))
                kept &= _unmentioned(keys, later)
                for world_size, ranks in replaced:
                    kept &= ~np.isin(_owners(keys, world_size), ranks)
                if kept.any():
                    yield number, source, rest, begin, begin + len(keys), kept
            if number:
                later = np.unique(np.concatenate(mentioned))
            whole = [rank for rank, rest in enumerate(rests) if rest.whole]
            if whole:
                replaced.append((len(rests), whole))

    def _is_mine(self, keys):
        if self._world_size == 1:
            return np.ones(len(keys), bool)
        return is_mine(keys, self._rank, self._world_size)

    def _without_keys(self):
        """Of the last dump.

        Counters of Bloom filters cannot be taken apart by key: the largest of all shards' are right
        for every key, if a little too large. At the same number of ranks each takes its own.
        """
        last, filters = self._rests[-1], self._rests[-1]
        if len(last) == self._world_size:
            filters = [last[self._rank]]
        waiting = [rest.waiting[self._is_mine(rest.waiting[:, 0])] for rest in last]
        counters = [rest.counters for rest in filters if len(rest.counters)]
        if len({len(c) for c in counters}) > 1:
            raise ValueError(
                "All shards of a dump must have filters of one size. Received: "
                f"{sorted({len(c) for c in counters})} counters"
            )
        nothing = np.zeros([0], np.int64)
        return Shard(
            *(nothing, np.zeros([0, self._dim], np.float32), np.zeros([0, 0], np.float32), [], []),
            waiting=np.concatenate(waiting),
            counters=functools.reduce(np.maximum, counters) if counters else nothing,
            step=max(rest.step for rest in last),
            optimizer_step=max(rest.optimizer_step for rest in last),
            initial_row_scale=max(rest.initial_row_scale for rest in last),
        )


def content_of(
    dump: Dump, rank: int, world_size: int, dim: int, progress: str | None = None
) -> Content:
    """What `rank` of `world_size` owns of a dump and its deltas; checks all files first.

    Args:
        progress: Of what call rank 0 says how far it is; None: it is silent.

    Raises:
        ValueError: a file is damaged, or is not part of this dump.
    """
    dumps = [dump, *dump.deltas]
    size = sum(file.stat().st_size for each in dumps for file in each.files)
    told = Progress(progress, size) if progress else None
    sources = [[each.open(n, dim, told) for n in range(len(each.files))] for each in dumps]
    return Content(sources, rank, world_size, dim)


def _owners(keys, world_size):
    return (keys.view(np.uint64) % np.uint64(world_size)).astype(np.int64)


def _unmentioned(keys, later):
    kept, keys = np.ones(len(keys), bool), np.ascontiguousarray(keys).view(np.uint64)
    if not len(later) or not len(keys):
        return kept
    at = np.minimum(np.searchsorted(keys, later), len(keys) - 1)
    kept[at[keys[at] == later]] = False
    return kept


def _selected(shard, kept):
    if kept.all():
        return shard
    records = None if shard.records is None else shard.records[kept]
    slots = shard.slot_rows[kept], shard.slot_names, shard.slot_widths
    return Shard(np.ascontiguousarray(shard.keys[kept]), shard.rows[kept], *slots, records=records)


def _log_of(shard):
    """Rule, options and steps, as `ReplayedSteps` takes them."""
    if shard.whole:  # its rows owe nothing
        return "sgd", {}, np.zeros([1, 3])
    if not shard.optimizer:
        return "sgd", {}, shard.steps
    named = _OPTIMIZER.fullmatch(shard.optimizer)
    if named is None:
        raise ValueError(f"A delta must name its optimizer. Received: {shard.optimizer!r:.200}")
    pairs = (pair.split("=") for pair in named.group(2).split(", "))
    return named.group(1), {name: _number(text) for name, text in pairs}, shard.steps


def _number(text) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else float(text)


def _bring_up(shard, number, logs, dim):
    """Takes the rows of dump `number` through the steps of all later deltas."""
    # Mostly all ranks have logged the same. A rank that exported its rows has not.
    paths = np.zeros(len(shard.keys), np.int64)
    different = [[_same_as(shards, log) for log in shards] for shards in logs]
    for first in different:
        if len(set(first)) > 1:
            paths = paths * len(first) + np.asarray(first)[_owners(shard.keys, len(first))]
            paths = np.unique(paths, return_inverse=True)[1]
    for path in np.unique(paths):
        mine = np.flatnonzero(paths == path)
        key = shard.keys[mine[:1]]
        segments = [shards[first[_owners(key, len(shards))[0]]]
                    for shards, first in zip(logs, different, strict=True)]  # fmt: skip
        steps = native.core().ReplayedSteps(dim, shard.slot_names, shard.slot_widths, segments)
        for begin in range(0, len(mine), _ROWS_AT_ONCE):
            at = mine[begin : begin + _ROWS_AT_ONCE]
            rows, slot_rows = shard.rows[at], shard.slot_rows[at]
            steps.bring_up(number, rows, slot_rows)
            shard.rows[at], shard.slot_rows[at] = rows, slot_rows


def _same_as(shards, log):
    """The first rank that has logged the same."""
    return next(
        rank
        for rank, other in enumerate(shards)
        if other[:2] == log[:2] and np.array_equal(other[2], log[2])
    )
