"""What long dumps, restores and exports show of how far they have come."""

import sys
import time

from sok_like.runtime.ranks import comm

_SECONDS = 5.0  # of a call that shows nothing, and between two lines of a log
_SECONDS_OF_BAR = 0.2
_WIDTH = 24


class Progress:
    """Shows on stderr how far a call has come once it lasts over 5 s, on rank 0 only."""

    # A terminal has a bar, anything else a line every 5 s. Without `what`, nothing is shown.

    def __init__(self, what: str | None, total: int | None = None):
        self._what, self._total, self._done = what, total, 0
        self._begin, self._last = time.monotonic(), 0.0

    def add(self, num_bytes: int) -> None:
        """Notes that so many more bytes are done."""
        self._done += num_bytes
        now = time.monotonic()
        pause = _SECONDS_OF_BAR if sys.stderr.isatty() else _SECONDS
        if self._what is None or now - self._begin < _SECONDS or now - self._last < pause:
            return
        if comm.current().rank == 0:
            self._last = now
            of_total = "" if self._total is None else f" of {self._total / 1e6:,.0f}"
            self._show(f"{self._done / 1e6:,.0f}{of_total} MB", now)

    def close(self) -> None:
        """Shows that the call has ended, if it has shown anything."""
        if self._last:
            now = time.monotonic()
            self._show(f"{self._done / 1e6:,.0f} MB in {now - self._begin:,.0f} s", now, ended=True)

    def _show(self, amount, now, ended=False):
        begin, end = "", "\n"
        text = f"{amount}, {self._done / 1e6 / (now - self._begin):,.0f} MB/s"
        if sys.stderr.isatty():
            begin, end = "\r\033[K", "\n" if ended else ""  # in place of what the line shows
            if self._total and not ended:
                filled = min(_WIDTH, _WIDTH * self._done // self._total)
                text = f"[{'#' * filled:.<{_WIDTH}}] {text}"
        line = f"{begin}sok_like: {self._what}, rank 0: {text}"
        print(line, end=end, file=sys.stderr, flush=True)
