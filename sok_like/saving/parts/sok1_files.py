"""The two files of a table that SOK 1.x's Saver wrote, for programs that read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable
from sok_like.saving.format.shard_reader import ShardFile
from sok_like.saving.format.sok1_files import KEYS, VALUES, stem
from sok_like.saving.parts.joined_files import JoinedFile, JoinedFiles
from sok_like.saving.parts.table_dumps import TableDump


class Sok1Files(JoinedFiles):
    """Both files of a dump that is complete, as a part."""

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
