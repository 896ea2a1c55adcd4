"""Judges from the reports of all ranks whether ranks wait in vain, and for whom.

A collective does not end at the same time on all ranks. Where many processes share the cores, a
rank may notice its end seconds late, while another waits for the next one or has finished. So each
rank numbers its waits; otherwise these ranks would seem to wait for different things.
"""

import dataclasses
import time
from typing import Any

_SURE = 1.5  # seconds after which a report counts as current
_LATE = 20.0  # seconds that a rank may be late in noticing the end of a collective
_FRESH = 1.0  # seconds; reports come four times as often
SILENT = 5.0  # seconds without a report after which a rank counts as silent


@dataclasses.dataclass
class _Rank:
    heard: float
    connected: bool = False  # it has reported, and its connection has not ended
    what: str = ""  # the exchange it waits for, empty if none
    since: float = 0.0
    ended: str = ""  # how it ended, if it has
    number: int = 0  # of its wait, or of its last one
    lost: bool = False  # it ended without saying how
    leaves: bool = False  # it joins no exchange that begins from now on
    stopped: bool = False  # it waits no longer: a verdict has reached it


class Judge:
    """What rank 0 knows of all ranks; `limit`: seconds that a rank may wait."""

    def __init__(self, world_size: int, limit: float):
        now = time.monotonic()
        self._limit = limit
        self._ranks = [_Rank(now) for _ in range(world_size)]

    def hear(self, rank: int, report: dict[str, Any]) -> None:
        """Takes a rank's report: fields of `_Rank`, and for how many `seconds` it has waited."""
        now = time.monotonic()
        rest = {name: report[name] for name in report if name != "seconds"}
        self._ranks[rank] = _Rank(now, True, since=now - report["seconds"], **rest)

    def lose(self, rank: int) -> None:
        """Notes that a rank's connection has ended."""
        gone = self._ranks[rank]
        gone.what, gone.lost, gone.leaves, gone.connected = "", not gone.ended, True, False
        gone.ended = gone.ended or "has ended without a message"

    def forgive(self, seconds: float) -> None:
        """Takes no account of `seconds` that have just passed, in which nobody could be heard."""
        for rank in self._ranks:
            rank.heard += seconds
            rank.since += seconds

    def word(self) -> dict[str, Any]:
        """What all ranks are told of each other."""
        now, limit, ranks = time.monotonic(), max(self._limit, SILENT), list(enumerate(self._ranks))
        silent = [(r, now - k.heard) for r, k in ranks if k.connected and now - k.heard > limit]
        return {
            "waited_for": any(rank.what for rank in self._ranks),
            "over": all(rank.ended for rank in self._ranks),
            # Which ranks join no more exchanges, and why; empty if all do.
            "left": "; ".join(f"rank {r} {rank.ended}" for r, rank in ranks if rank.leaves),
            # Whether a verdict has reached every rank that has not left and is not silent.
            "stopped": all(k.stopped or k.leaves or self._silent(k) for k in self._ranks),
            # Which ranks have stopped reporting for longer than the limit; empty if none has.
            "silent": "; ".join(f"rank {r} has not answered for {s:.0f} s" for r, s in silent),
        }

    def verdict(self) -> str:
        """Why the ranks that wait should stop waiting; empty if they should go on."""
        now = time.monotonic()
        waiting = {
            r: now - rank.since
            for r, rank in enumerate(self._ranks)
            if rank.what and not self._silent(rank)
        }
        if not waiting:
            return ""
        first = max(waiting, key=lambda r: waiting[r])
        what = self._ranks[first].what
        came = [r for r in waiting if self._ranks[r].what == what]
        away = [r for r in range(len(self._ranks)) if r not in came]
        if not self._in_vain(waiting, came, away):
            # A rank whose last report is neither new nor old may be silent: soon that is known.
            unsure = any(_FRESH < now - r.heard <= SILENT and not r.ended for r in self._ranks)
            if waiting[first] < self._limit or unsure:
                return ""
        if not away:
            return f"{where(what)} takes longer than {self._limit:g} s, though all ranks are in it"
        reasons = "; ".join(f"rank {r} {self._doing(self._ranks[r], now)}" for r in away)
        ranks = ("rank " if len(came) == 1 else "ranks ") + ", ".join(map(str, came))
        waited = f"{ranks} reached it and waited for {waiting[first]:.0f} s"
        return f"{where(what)}: {waited}; {reasons}"

    def _in_vain(self, waiting, came, away):
        """Whether the exchange that they wait for cannot happen."""
        number = self._ranks[came[0]].number
        if len(waiting) == len(self._ranks) and away:  # all wait, but not all for the same
            concerned = list(waiting)
            certain = all(self._ranks[r].number == number for r in waiting)
        elif any(self._ranks[r].ended for r in away):
            concerned = came
            gone = [self._ranks[r] for r in away if self._ranks[r].ended]
            certain = any(rank.number < number or rank.lost for rank in gone)
        else:
            return False
        return min(waiting[r] for r in concerned) > (_SURE if certain else _LATE)

    @staticmethod
    def _silent(rank):
        return time.monotonic() - rank.heard > SILENT

    def _doing(self, rank, now):
        if rank.ended:
            return rank.ended
        place = f"in {where(rank.what)}" if rank.what else "in no exchange"
        if not self._silent(rank):
            return f"is {place}" if rank.what else f"did not reach it and is {place}"
        if not rank.connected:
            return "has never reported"
        return f"has not answered for {now - rank.heard:.0f} s; its last report: {place}"


def where(what: str) -> str:
    """The name of an exchange in errors."""
    return f"the exchange '{what}'"
