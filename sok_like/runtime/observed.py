"""Statistics of this process's own steps: the keys of a batch, and the time in exchanges.

The C++ library counts. It keeps batches only while they are observed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from sok_like.runtime import native


class ObservedBatch(NamedTuple):
    """Keys of a table in one batch of this rank, duplicates included."""

    keys: int
    unique: int  # different keys
    hottest: int  # occurrences of the most frequent 1% of the different keys


@functools.cache
def _library():
    native.ops()  # loads it
    library = ctypes.CDLL(str(native.ops_path()))
    library.sok_waited_seconds.restype = ctypes.c_double
    library.sok_observed_batch.restype = ctypes.c_int64
    return library


def observe_batches(on: bool) -> None:
    """If `on`, forgets earlier batches and keeps those to come; if not, keeps no more."""
    _library().sok_observe_batches(int(on))


def observed_batch(table_name: str) -> ObservedBatch:
    """The batch kept of a table; zeros without one."""
    unique, hottest = ctypes.c_int64(0), ctypes.c_int64(0)
    keys = _library().sok_observed_batch(
        table_name.encode(), ctypes.byref(unique), ctypes.byref(hottest)
    )
    return ObservedBatch(keys, unique.value, hottest.value)


def exchange_seconds() -> float:
    """Seconds that this process has spent in exchanges with other ranks."""
    return _library().sok_waited_seconds()
