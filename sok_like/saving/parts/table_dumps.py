"""Dumps of a table in a folder of the user's: whole ones, deltas, and a base made of its deltas."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.saving.format import deltas, durable, manifest
from sok_like.saving.format.shard_reader import ShardFile
from sok_like.saving.format.sok1_files import KEYS, VALUES, stem
from sok_like.saving.parts import dump_checks
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.saving.parts.joined_files import JoinedFile, JoinedFiles
from sok_like.table import table_reader

_KEPT_NUMBERS = 256  # dumps that a table remembers; its log of changes is shorter


def remember(table: Any, name: str, number: int) -> None:
    """Records, under `number`, that the table keeps what changes since the dump `name`."""
    numbers = table.__dict__.setdefault("_dump_numbers", {})
    numbers[name] = number
    while len(numbers) > _KEPT_NUMBERS:
        numbers.pop(next(iter(numbers)))


class TableDump(HashTablePart):
    """A whole dump in a folder, which is asked for its path when the dump begins."""

    def __init__(self, table: Any, filepath: str | os.PathLike, rows_only: bool = False):
        super().__init__(table)
        self._filepath, self._rows_only, self._id = filepath, rows_only, ""
        self.num_keys = 0  # of this rank, once it has written them

    def begin(self) -> Any:
        # The id is drawn in each run: the op of a graph writes another dump each time.
        self.folder = os.fspath(self._filepath)
        self._check_owner()
        return {"id": f"{secrets.randbits(62):016x}"}

    def _check_owner(self):
        dump_checks.check_owner(self.folder, self.table)

    def agree(self, begun: Sequence[Any]) -> None:
        self._id = begun[0]["id"]

    def dump_id(self) -> str:
        return self._id

    def _write_shard(self, shard):
        if self._rows_only:
            shard.optimizer_step = 0
        self.num_keys = len(shard.keys)
        return super()._write_shard(shard)

    def done(self) -> None:
        dump_checks.mark_writer(self.folder, self.table)


class GrowingDump(TableDump):
    """A dump that deltas may follow: a whole one, or a delta that follows the dump `since`."""

    following = ()
    instant = 0  # its number, once it is read

    def __init__(self, table: Any, filepath: str | os.PathLike, since: str | int | None = None):
        super().__init__(table, filepath)
        self._since, self._before = since, None  # the name of that dump
        self._number = 0  # of its instant; 0: everything

    def begin(self) -> Any:
        begun = super().begin()
        if self._since is None:
            return {**begun, "since": None}
        before = self._chain_to(self._since)[-1]
        self._number = self.table.__dict__.get("_dump_numbers", {}).get(before.name, 0)
        if not self._number:
            raise ValueError(
                "A delta must follow a dump that this table has written by `dump`, or was "
                f"restored from. Received: since={before.name!r} (table '{self.name}'); "
                "begin with a full dump, `since=None`"
            )
        return {**begun, "since": before.name}

    def agree(self, begun: Sequence[Any]) -> None:
        super().agree(begun)
        names = [each["since"] for each in begun]
        if len(set(names)) > 1:
            raise RuntimeError(
                "All ranks must write a delta since the same dump, in a folder that they share. "
                f"Received: since={names}"
            )
        self._before = names[0]

    def write(self) -> Any:
        registered = int(self.table.register_for_read())
        with table_reader.content(registered, self.table.dim, self._number) as (shard, instant):
            self.instant, self.step = instant, int(shard.optimizer_step)
            if self._before is None:
                shard.erased = None
            return self._write_shard(shard)

    def finish(self, entries: Sequence[Any]) -> None:
        if self._before is None:
            super().finish(entries)
            return
        base, *others = chain = self._chain_to(self._before)
        new = manifest.Dump([], list(entries), "", self.dump_id(), self.step)
        following = [
            {"dump": dump.name, "since": before.name, "step": dump.step, "shards": dump.entries}
            for before, dump in zip(chain, [*others, new], strict=True)
        ]
        self._write_manifest(base.name, base.entries, base.step, following)

    def done(self) -> None:
        super().done()
        remember(self.table, self.dump_id(), self.instant)

    def _chain_to(self, since):
        """The dumps of the folder up to the one that a delta since `since` follows."""
        base = manifest.read_manifest(self.folder, self.name, self.table.dim)
        if not base.may_grow:
            raise ValueError(
                f"A delta must follow a dump that `dump` has written. Received: a dump of table "
                f"'{self.name}' that `dump_to_file` has written; begin with a full dump, "
                "`since=None`"
            )
        return manifest.chain_to(base, since, "since", self.name)


class CompactedDump(TableDump):
    """A base in place of a base and its deltas; without deltas nothing is written."""

    def _check_owner(self):
        pass  # it is the same dump afterwards

    def write(self) -> Any:
        dump = manifest.read_manifest(self.folder, self.name, self.table.dim)
        if not dump.deltas:
            return {"dump": dump.identity, "entry": None}
        rank, world_size = _this_rank()
        what = f"compact of table '{self.name}'"
        content = deltas.content_of(dump, rank, world_size, self.table.dim, what)
        entry = self._write_shard(content.sorted())
        self._rest = content.rest
        return {"dump": dump.identity, "entry": entry}

    def see(self, entries: Sequence[Any]) -> None:
        dump_checks.same_dump(entries)
        super().see([each["entry"] for each in entries])
        entry = entries[comm.current().rank]["entry"]
        if entry is not None:
            self._check_readable(entry)

    def _check_readable(self, entry):
        """Reads this rank's file as a restore will: the dump that it replaces is removed next."""
        path, owner, dim = durable.join(self.folder, entry["file"]), _this_rank(), self.table.dim
        content = deltas.MergedDump([[ShardFile(path, dim, entry, owner=owner)]], *owner, dim)
        for _ in content.parts():  # checks the order of keys, and every row
            pass
        received = [content.num_keys, content.rest.slot_names, content.rest.records is None]
        required = [entry["keys"], self._rest.slot_names, self._rest.records is None]
        if received != required:
            raise ValueError(
                f"{path} must have as many keys of this rank, slot variables and records as were "
                f"written: {required}. Received: {received}; the dump and its deltas are unchanged"
            )

    def finish(self, entries: Sequence[Any]) -> None:
        if entries[0]["entry"] is not None:
            # The base takes the name of the last delta, which the next delta follows.
            last = manifest.read_manifest(self.folder, self.name, self.table.dim).deltas[-1]
            self._write_manifest(last.name, [each["entry"] for each in entries], last.step, [])

    def done(self) -> None:
        pass  # the dump belongs to whom it belonged


def _this_rank():
    return comm.current().rank, comm.current().world_size


class Sok1Files(JoinedFiles):
    """The two files that SOK 1.x's Saver wrote of a table, from a dump that is complete."""

    def __init__(self, dump: TableDump):
        super().__init__(dump.name)
        self._dump = dump

    def begin(self) -> Any:
        self.folder = self._dump.folder
        return super().begin()

    def files(self) -> list[JoinedFile]:
        table, num_keys = self._dump.table, self._dump.num_keys
        key_dtype = np.dtype(table.key_dtype.as_numpy_dtype)
        path = durable.join(self.folder, self._dump.file(comm.current().rank))
        shard, start = ShardFile(path, table.dim), stem(self.name)
        keys = (part.astype(key_dtype) for part in shard.parts("keys"))
        return [
            JoinedFile(start + KEYS, self.name, b"", num_keys, key_dtype.itemsize, keys),
            JoinedFile(
                start + VALUES, self.name, b"", num_keys, 4 * table.dim, shard.parts("rows")
            ),
        ]
