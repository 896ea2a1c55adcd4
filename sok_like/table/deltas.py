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
import re
from typing import Any

import numpy as np

from sok_like.runtime import native
from sok_like.table.dump_file import Dump, owned_by
from sok_like.table.progress import Progress
from sok_like.table.shard_file import Shard

_ROWS_AT_ONCE = 2**16
_OPTIMIZER = re.compile(r"(\w+)\((.*)\)")


def read_content(
    dump: Dump, rank: int, world_size: int, dim: int, progress: str | None = None
) -> Shard:
    """What `rank` of `world_size` owns of a dump and its deltas.

    Reads one file at a time: only what is kept stays in memory, and what is joined of it at the
    end. That is at most twice the bytes of the files.

    Args:
        progress: Of what call rank 0 says how far it is; None: it is silent.

    Raises:
        ValueError: a file is damaged, or is not part of this dump.
    """
    dumps = [dump, *dump.deltas]
    size = sum(file.stat().st_size for each in dumps for file in each.files)
    told = Progress(progress, size) if progress else None
    parts = [[_kept(each, n, rank, world_size, dim, told) for n in range(len(each.files))]
             for each in dumps]  # fmt: skip
    for number, shards in enumerate(parts):
        if any((shard.erased is not None) != (number > 0) for shard in shards):
            raise ValueError(
                f"{dumps[number].files[0]} must be {'a delta' if number else 'the base of a dump'}"
            )
    if not dump.deltas:
        return owned_by(parts[0], rank, world_size, dim)
    last = owned_by([_without_rows(shard) for shard in parts[-1]], rank, world_size, dim)
    found = owned_by(_latest(parts, dim), rank, world_size, dim)
    found.waiting, found.counters = last.waiting, last.counters
    found.step, found.optimizer_step = last.step, last.optimizer_step
    return found


def _kept(dump, number, rank, world_size, dim, told):
    """The part of a file that this rank owns."""
    shard = dump.read(number, dim, told)
    if len(dump.files) == world_size and number != rank:
        # Every rank takes back its own Bloom filter, as it was.
        shard.counters = shard.counters[:0]
    mine = owned_by([shard], rank, world_size, dim)
    if not len(mine.keys):  # so that a file without keys still says what slots there are
        mine.slot_names, mine.slot_widths = shard.slot_names, shard.slot_widths
        mine.slot_rows = np.zeros([0, sum(shard.slot_widths)], np.float32)
    if shard.erased is not None:
        owners = shard.erased.view(np.uint64) % np.uint64(world_size)
        mine.erased, mine.whole = shard.erased[owners == rank], shard.whole
        mine.steps, mine.optimizer = shard.steps.copy(), shard.optimizer
    return mine


def _without_rows(shard):
    records = None if shard.records is None else shard.records[:0]
    fields = {"keys": shard.keys[:0], "rows": shard.rows[:0], "slot_rows": shard.slot_rows[:0]}
    return dataclasses.replace(shard, **fields, records=records)


def _latest(parts, dim):
    """The rows that count, brought up to the last delta; `parts` are empty then."""
    found = []
    later = np.zeros([0], np.uint64)  # keys that a later dump mentions
    # Of a later dump by so many ranks, those whose keys replace all that was there.
    replaced: list[tuple[int, list[int]]] = []
    logs = [[_log_of(shard) for shard in shards] for shards in parts[1:]]
    owing = any(len(steps) for shards in logs for _, _, steps in shards)
    for number in range(len(parts) - 1, -1, -1):
        shards, mentioned = parts[number], [later]
        world_size = len(shards)
        whole = [rank for rank, shard in enumerate(shards) if shard.whole]
        while shards:
            shard = shards.pop(0)  # so that its rows are not in memory twice
            kept = _unmentioned(shard.keys, later)
            for writers, ranks in replaced:
                kept &= ~np.isin(_owners(shard.keys, writers), ranks)
            mentioned.append(shard.keys.view(np.uint64))
            if number:
                mentioned.append(shard.erased.view(np.uint64))
            shard = _selected(shard, kept)
            if owing:
                _bring_up(shard, number, logs, dim)
            found.append(shard)
        later = np.unique(np.concatenate(mentioned)) if number else later
        if whole:
            replaced.append((world_size, whole))
    return found


def _owners(keys, world_size):
    return (keys.view(np.uint64) % np.uint64(world_size)).astype(np.int64)


def _unmentioned(keys, later):
    kept, keys = np.ones(len(keys), bool), np.ascontiguousarray(keys).view(np.uint64)
    if not len(later) or not len(keys):
        return kept
    if not (keys[1:] > keys[:-1]).all():  # in a file they ascend
        return ~np.isin(keys, later)
    at = np.minimum(np.searchsorted(keys, later), len(keys) - 1)
    kept[at[keys[at] == later]] = False
    return kept


def _selected(shard, kept):
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
