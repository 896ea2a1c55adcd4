"""The progress messages of long dumps and restores."""

from __future__ import annotations

import sys
import time

from sok_like.runtime.ranks import comm

_SECONDS = 2.0


class Progress:
    """Prints every 2 s to stderr how far a call has come, out of `total` bytes, on rank 0 only."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._begin = self._last = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Notes that so many more bytes are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last < _SECONDS or comm.current().rank != 0:
            return
        self._last = now
        done, total = self._done / 1e6, self._total / 1e6
        rate = done / (now - self._begin)
        text = f"{done:,.0f} of {total:,.0f} MB, {rate:,.0f} MB/s"
        print(f"sok_like: {self._what}, rank 0: {text}", file=sys.stderr, flush=True)
