"""Statistics of this process's own steps: keys of a batch, their owners, and time in exchanges.

The C++ library counts. It keeps batches only while they are observed. Two of its warnings are here.
"""

import ctypes
import warnings
from typing import NamedTuple

from sok_like.runtime.framework import hooks
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm


class ObservedBatch(NamedTuple):
    """Keys of a table in one batch of this rank, duplicates included."""

    keys: int
    unique: int  # different keys
    hottest: int  # occurrences of the most frequent 1% of the different keys


def observe_batches(on: bool) -> None:
    """If `on`, forgets earlier batches and keeps those to come; if not, keeps no more."""
    libraries.functions().sok_observe_batches(int(on))


def observed_batch(table_name: str) -> ObservedBatch:
    """The batch kept of a table; zeros without one."""
    observed = libraries.functions().sok_observed_batch
    observed.restype = ctypes.c_int64
    unique, hottest = ctypes.c_int64(0), ctypes.c_int64(0)
    keys = observed(table_name.encode(), ctypes.byref(unique), ctypes.byref(hottest))
    return ObservedBatch(keys, unique.value, hottest.value)


def exchange_seconds() -> float:
    """Seconds that this process has spent in exchanges with other ranks."""
    waited = libraries.functions().sok_waited_seconds
    waited.restype = ctypes.c_double
    return waited()


_warned: set[str] = set()  # tables


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_double)
def _warn_of_uneven_owners(table, owner, times_its_share):
    """Called by lookups on several ranks (`cpp/tf/owner_watch.h`). Rank 0 warns, once."""
    table = table.decode()
    if comm.current_or_single().rank > 0 or table in _warned:
        return
    _warned.add(table)
    warnings.warn(
        f"Table '{table}': rank {owner} owns {times_its_share:.2f} times the mean number of keys. "
        "A key's owner is key % number of ranks, so keys with a common factor meet on few ranks. "
        "Mix ids before they become keys: docs/semantics/keys_and_rows.md, 'Keys with a common "
        "factor'.",
        stacklevel=2,
    )


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
def _warn_of_surplus(table, capacity, num_keys):
    """Called after a write or a restore (`cpp/tf/common.cc`)."""
    warnings.warn(
        f"Table '{table.decode()}' holds at most {capacity} keys on rank "
        f"{comm.current_or_single().rank}, and was given {num_keys} more: those with the lowest "
        "scores of ScoreEvict were evicted, of equal scores the smaller keys.",
        stacklevel=2,
    )


@hooks.at_init
def _install():
    libraries.functions().sok_on_uneven_owners(_warn_of_uneven_owners)
    libraries.functions().sok_on_surplus(_warn_of_surplus)
