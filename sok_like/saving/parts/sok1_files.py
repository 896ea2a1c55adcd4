"""The two files of a table that SOK 1.x's Saver wrote, for programs that read them.

Each rank writes its part of both under another name. Rank 0 then removes the old keys, and renames
first the rows, then the keys. So if both files are there, they belong together.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable
from sok_like.saving.format.part_file import write_part
from sok_like.saving.format.shard_reader import ShardFile
from sok_like.saving.format.sok1_files import KEYS, VALUES, stem
from sok_like.saving.parts.checkpointable import CheckpointPart
from sok_like.saving.parts.table_dumps import TableDump


class Sok1Files(CheckpointPart):
    """Both files of a dump that is complete, as a part."""

    def __init__(self, dump: TableDump):
        self.name, self._dump = dump.name, dump
        self._begun: Sequence[Any] = ()
        self._staged: list[str] = []  # paths of this save, until it is complete

    def begin(self) -> Any:
        self.folder = self._dump.folder
        file = durable.join(self.folder, self._dump.file(comm.current().rank))
        return {"file": file, "keys": self._dump.num_keys, "save": f"{secrets.randbits(62):016x}"}

    def agree(self, begun: Sequence[Any]) -> None:
        self._begun = begun
        suffix = f".{begun[0]['save']}.tmp"
        self._staged = [path.removesuffix(".file") + suffix for path in self._targets()]

    def _targets(self):
        return [durable.join(self.folder, stem(self.name) + kind) for kind in (KEYS, VALUES)]

    def write(self) -> None:
        table, rank = self._dump.table, comm.current().rank
        dtypes = np.dtype(table.key_dtype.as_numpy_dtype), np.float32
        for path, array, dtype in zip(self._staged, ("keys", "rows"), dtypes, strict=True):
            if durable.local(path) is not None:
                begin = sum(each["keys"] for each in self._begun[:rank])
                for rows in self._parts_of(self._begun[rank], array, dtype):
                    write_part(path, rows, begin * rows[:1].nbytes, self.name)
                    begin += len(rows)
            elif rank == 0:  # elsewhere a file cannot be written by several ranks
                with durable.written(path) as file:
                    for each in self._begun:
                        for rows in self._parts_of(each, array, dtype):
                            file.write(rows.tobytes())

    def _parts_of(self, begun, array, dtype):
        shard = ShardFile(begun["file"], self._dump.table.dim)
        return (rows.astype(dtype) for rows in shard.parts(array))

    def see(self, entries: Sequence[Any]) -> None:
        pass  # the dump has the same content, and was seen

    def finish(self, entries: Sequence[Any]) -> None:
        targets = self._targets()
        durable.rename_all(list(zip(self._staged, targets, strict=True))[::-1])
        for target in targets:  # left by killed processes
            begin = re.escape(os.path.basename(target).removesuffix(".file"))
            for name in durable.names(self.folder):
                if re.fullmatch(begin + r"\.[0-9a-f]{16}\.tmp(\.tmp)?", name):
                    durable.remove(durable.join(self.folder, name))

    def remove(self) -> None:
        for path in self._staged:
            durable.remove(path)
