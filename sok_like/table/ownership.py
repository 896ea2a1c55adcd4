"""Which rank owns a key, in NumPy: rank `uint64(key) % world_size`. `keys.owner` is the same op."""

from __future__ import annotations

import numpy as np

from sok_like.runtime.ranks import comm


def owners(keys: np.ndarray, world_size: int) -> np.ndarray:
    """The rank that owns each of the int64 `keys`, int64."""
    if world_size == 1:
        return np.zeros(len(keys), np.int64)
    unsigned = np.ascontiguousarray(keys).view(np.uint64)
    return (unsigned % np.uint64(world_size)).astype(np.int64)


def owned(keys: np.ndarray) -> np.ndarray:
    """Positions of the int64 `keys` that this rank owns."""
    communicator = comm.current()
    return np.flatnonzero(owners(keys, communicator.world_size) == communicator.rank)
