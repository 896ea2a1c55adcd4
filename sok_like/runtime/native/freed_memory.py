"""Freed memory stays with the process, for the tensors of its next step.

By default glibc returns large freed blocks to the system, which clears every page again at its
first touch. That takes a third of a step that only moves memory. tcmalloc and jemalloc keep such
blocks, and so does TensorFlow's own allocator where oneDNN's ops run. So `sok.Init` raises limits:

    M_MMAP_THRESHOLD  256 MiB   larger blocks go back to the system at once
    M_TRIM_THRESHOLD  512 MiB   so much may stay free at the end of the heap
    M_TOP_PAD          64 MiB   the size of a thread's heap, which then stays when it is empty

A thread's heap has no room for blocks of 64 MiB or more: those that TensorFlow's threads take still
go back. One heap for all threads (M_ARENA_MAX) would keep them, but took 25 % more memory
at its peak.

`SOK_KEEP_MEMORY=0` leaves glibc alone. So does any limit that the user has set.
"""

import ctypes
import os

_MIB = 2**20
# The numbers are those of malloc.h. Before version 2.35, the first limit may be 32 MiB at most.
_LIMITS = (
    (-3, (256 * _MIB, 32 * _MIB)),  # M_MMAP_THRESHOLD
    (-1, (512 * _MIB,)),  # M_TRIM_THRESHOLD
    (-2, (64 * _MIB,)),  # M_TOP_PAD
)


def keep() -> None:
    """Raises the limits, unless the environment says otherwise. Only glibc has them."""
    chosen = os.environ.get("SOK_KEEP_MEMORY", "1")
    if chosen not in ("0", "1"):
        raise ValueError(f"SOK_KEEP_MEMORY must be 0 or 1. Received: SOK_KEEP_MEMORY={chosen!r}")
    by_user = any(name.startswith("MALLOC_") for name in os.environ)
    by_user |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and chosen == "1" and not by_user:
        for parameter, values in _LIMITS:
            any(mallopt(parameter, value) for value in values)
