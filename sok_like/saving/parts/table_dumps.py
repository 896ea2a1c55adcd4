"""Dumps of a table in a folder of the user's: whole ones, deltas, and a base made of its deltas.

A dump has owners: the tables of this program that wrote or read it. Another table of the same name
does not replace it, nor does another job that is alive.
"""

import contextlib
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import check_same
from sok_like.saving.format import deltas, durable, folders, manifest
from sok_like.saving.format.shard_file import ShardFile
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.saving.parts.sok_files import KEYS, VALUES, JoinedFile, JoinedFiles, stem
from sok_like.table import table_reader

_KEPT_NUMBERS = 256  # dumps that a table remembers; its log of changes is shorter
# The tables that wrote or read the dump in a folder, by folder and table name.
_owners: dict[tuple[str, str], list[weakref.ref]] = {}


def _place(folder, table):
    local = durable.local(folder)
    return os.path.normpath(folder) if local is None else os.path.realpath(local), table.table_name


def _lock(folder, table):
    """Keeps other jobs out of the folder as long as there is the table."""
    if comm.current().rank == 0:
        locks = vars(table).setdefault("_locked_folders", set())
        locks.add(folders.lock(folder, "filepath"))


def add_owner(folder: str, table: Any) -> None:
    """Notes that a table has read the dump in a folder."""
    _owners.setdefault(_place(folder, table), []).append(weakref.ref(table))


def same_dump(messages: Sequence[Any]) -> None:
    """Raises RuntimeError unless all ranks report the same `dump`."""
    identities = [message["dump"] for message in messages]
    check_same(identities, "All ranks must read the same dump, from a folder that they share")


def remember(table: Any, name: str, number: int) -> None:
    """Records, under `number`, that the table keeps what changes since the dump `name`."""
    numbers = vars(table).setdefault("_dump_numbers", {})
    numbers[name] = number
    while len(numbers) > _KEPT_NUMBERS:
        numbers.pop(next(iter(numbers)))


class TableDump(HashTablePart):
    """A whole dump in a folder, which is asked for its path when the dump begins."""

    def __init__(self, table: Any, filepath: str | os.PathLike, rows_only: bool = False):
        super().__init__(table)
        self._filepath, self._rows_only, self._id = filepath, rows_only, ""
        self.entry: dict[str, Any] = {}  # of this rank's file, once it is written

    def begin(self) -> Any:
        # The id is drawn in each run: the op of a graph writes another dump each time.
        self.folder = os.fspath(self._filepath)
        self._check_owner()
        return {"id": f"{secrets.randbits(62):016x}"}

    def _check_owner(self):
        """Raises if another table or job has the dump, or the scheme has no file system."""
        if durable.exists(self.folder) and durable.is_folder(self.folder):
            _lock(self.folder, self.table)
        owners = [ref() for ref in _owners.get(_place(self.folder, self.table), [])]
        alive = [table for table in owners if table is not None]
        if alive and all(table is not self.table for table in alive):
            raise ValueError(
                "Tables that are dumped into one folder must have different names. Received: two "
                f"tables '{self.name}' for {self.folder!r}; dump one of them into another folder"
            )

    def agree(self, begun: Sequence[Any]) -> None:
        self._id = begun[0]["id"]

    def dump_id(self) -> str:
        return self._id

    def _write_shard(self, shard):
        if self._rows_only:
            shard.optimizer_step = 0
        self.entry = super()._write_shard(shard)
        return self.entry

    def done(self) -> None:
        with contextlib.suppress(RuntimeError):  # two jobs at once; the next dump of one raises
            _lock(self.folder, self.table)
        _owners[_place(self.folder, self.table)] = [weakref.ref(self.table)]


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
        self._number = vars(self.table).get("_dump_numbers", {}).get(before.name, 0)
        if not self._number:
            raise ValueError(
                "A delta must follow a dump that this table has written by `dump`, or was "
                f"restored from. Received: since={before.name!r} (table '{self.name}'); "
                "begin with a full dump, `since=None`"
            )
        return {**begun, "since": before.name}

    def agree(self, begun: Sequence[Any]) -> None:
        super().agree(begun)
        names = [message["since"] for message in begun]
        required = "All ranks must write a delta since the same dump, in a folder that they share"
        check_same(names, required)
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
            received = f"a dump of table '{self.name}' that `dump_to_file` has written"
            begin = "begin with a full dump, `since=None`"
            required = "follow a dump that `dump` has written"
            raise durable.wrong("A delta", required, f"{received}; {begin}")
        return manifest.chain_to(base, since, "since", self.name)


class CompactedDump(TableDump):
    """A base in place of a base and its deltas; without deltas nothing is written."""

    def _check_owner(self):
        pass  # it is the same dump afterwards

    def write(self) -> Any:
        dump = manifest.read_manifest(self.folder, self.name, self.table.dim)
        if not dump.deltas:
            return {"dump": dump.identity, "entry": None}
        owner = comm.current().rank, comm.current().world_size
        call = f"compact of table '{self.name}'"
        content = deltas.content_of(dump, *owner, self.table.dim, call)
        entry = self._write_shard(content.sorted())
        self._rest = content.rest
        return {"dump": dump.identity, "entry": entry}

    def see(self, entries: Sequence[Any]) -> None:
        same_dump(entries)
        owner, dim = (comm.current().rank, comm.current().world_size), self.table.dim
        entry = entries[owner[0]]["entry"]
        if entry is None:  # there was nothing to write
            return
        super().see([message["entry"] for message in entries])
        # Reads this rank's file as a restore will: the dump that it replaces is removed next.
        path = durable.join(self.folder, entry["file"])
        content = deltas.MergedDump([[ShardFile(path, dim, entry, owner=owner)]], *owner, dim)
        for _ in content.parts():  # checks the order of keys, and every row
            pass
        received = [content.num_keys, content.rest.slot_names, content.rest.records is None]
        required = [entry["keys"], self._rest.slot_names, self._rest.records is None]
        if received != required:
            text = f"have as many keys of this rank, slot variables and records as {required}"
            raise durable.wrong(path, text, f"{received}; the dump and its deltas are unchanged")

    def finish(self, entries: Sequence[Any]) -> None:
        if entries[0]["entry"] is not None:
            # The base takes the name of the last delta, which the next delta follows.
            last = manifest.read_manifest(self.folder, self.name, self.table.dim).deltas[-1]
            shards = [message["entry"] for message in entries]
            self._write_manifest(last.name, shards, last.step, [])

    def done(self) -> None:
        pass  # the dump belongs to whom it belonged


def sok1_files(dump: TableDump) -> JoinedFiles:
    """The two files that SOK 1.x's Saver wrote of a table, from a dump that is complete."""

    def find():
        dim, key_dtype = dump.table.dim, dump.table.key_dtype.as_numpy_dtype
        entry, start = dump.entry, stem(dump.name)
        shard = ShardFile(durable.join(dump.folder, entry["file"]), dim, entry)
        keys = (part.astype(key_dtype) for part in shard.parts("keys"))
        head = dump.name, b"", entry["keys"]
        return dump.folder, [
            JoinedFile(start + KEYS, *head, np.dtype(key_dtype).itemsize, keys),
            JoinedFile(start + VALUES, *head, 4 * dim, shard.parts("rows")),
        ]

    return JoinedFiles(dump.name, find)
