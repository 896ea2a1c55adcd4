"""Variables of which each rank has its own values: read by the number of ranks that wrote them.

model.ckpt.tables/ranks.3f2a/1-of-2.npz     the values of rank 1, by their keys in the checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.saving.format import array_files
from sok_like.saving.parts.checkpointable import CheckpointPart


class RankVariables(CheckpointPart):
    """Variables of this rank, as a part: `values` yields their keys and values."""

    name = "ranks"

    def __init__(self, values: Callable[[], Iterable[tuple[str, Any]]]):
        self._values = values

    def write(self) -> dict[str, Any]:
        """Writes the values of this rank."""
        arrays = {}
        for key, tensor in self._values():
            value = tf.convert_to_tensor(tensor)
            dtype = value.dtype.as_numpy_dtype
            arrays[key] = array_files.Unread(tuple(value.shape), dtype, value.numpy)
        here = comm.current()
        return array_files.write(self.folder, here.rank, here.world_size, arrays)

    def finish(self, entries: Sequence[dict[str, Any]]) -> None:
        """Lists the files of all ranks."""
        array_files.finish(self.folder, entries)


def read(folder: str, world_size: int, listed: bool) -> dict[str, np.ndarray]:
    """The values of this rank, by key."""
    files, rank = array_files.Folder(folder, world_size, listed), comm.current().rank
    files.check([rank])
    with files.open(rank) as archive:
        return {key: archive[key] for key in archive.files}
