"""Ranks that a launcher has started on this host, and how they end.

    sok_like.run    gets the signal, and hands it to the ranks
      mpirun        in a session of its own: it would kill the ranks as soon as it got the signal
        ranks       save, and end; mpirun ends when they have
    If a parent is killed, Linux ends its child: mpirun by SIGTERM, a rank by SIGKILL.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

# A program that becomes another one, behind prctl(PR_SET_PDEATHSIG, number).
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_LAUNCHER_ENDS = 5.0  # seconds; mpirun takes one to end after its ranks


def bound(command: Sequence[str], number: int) -> list[str]:
    """The command, whose process gets the signal `number` when its parent ends in any way."""
    return [sys.executable, "-S", "-c", _BOUND, str(int(number)), *command]


class Launched:
    """One start of a job's ranks, which run `command`.

    `launch` is the launcher with its options, empty for one rank, which needs none.
    """

    def __init__(self, launch: Sequence[str], command: Sequence[str], environment: dict[str, str]):
        self._command, self._needs_launcher = list(command), bool(launch)
        line = bound(command, signal.SIGKILL)
        if launch:
            line = bound([*launch, *line], signal.SIGTERM)
        self.process = subprocess.Popen(line, env=environment, start_new_session=True)

    def send(self, number: int) -> None:
        """Sends a signal to the ranks; those on other hosts get none."""
        # Without ranks here the launcher gets it, which ends those elsewhere.
        for pid in self._ranks() or [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, seconds: float) -> int | None:
        """The status, as a shell says it; None if ranks still run after so many seconds."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else 128 - status

    def kill(self) -> int:
        """Ends the ranks at once; returns the status."""
        self.send(signal.SIGKILL)
        self.process.terminate()
        status = self.wait(_LAUNCHER_ENDS)
        while status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.wait(_LAUNCHER_ENDS)
        return status

    def _ranks(self):
        """The processes below the launcher that run the command, without children of theirs."""
        if not self._needs_launcher:
            return [self.process.pid]
        children, words = defaultdict(list), {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                line = os.fsdecode((process / "cmdline").read_bytes())
                words[int(process.name)] = line.split("\0")[:-1]
                children[int(parent)].append(int(process.name))
        ranks, others = [], children[self.process.pid]
        while others:
            pid = others.pop()
            if words[pid][-len(self._command) :] == self._command:
                ranks.append(pid)
            else:
                others += children[pid]
        return ranks


class Signals:
    """Hands the signals that end a job on to its ranks, which have `grace` seconds to end."""

    def __init__(self, grace: float):
        self.received: list[int] = []
        self._grace = grace
        self._job: Launched | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGTSTP, self._pause)

    def _receive(self, number, frame):
        self.received.append(number)
        if self._job is not None and len(self.received) == 1:
            self._tell(self._job)

    def _tell(self, job):
        # SIGHUP, of a terminal that was closed, would end Python without a backup.
        number = self.received[0]
        job.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def _pause(self, number, frame):
        """Ctrl-Z: ranks are in another session, which no terminal stops."""
        if self._job is not None:
            self._job.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._job is not None:  # somebody has continued this process
            self._job.send(signal.SIGCONT)

    def status_of(self, job: Launched) -> int:
        """Waits for the job's end; its status, 128 + signal if a signal ended it."""
        self._job, deadline = job, None
        if self.received:  # before there was a job that could receive it
            self._tell(job)
        while (status := job.wait(0.2)) is None:
            if self.received and deadline is None:
                deadline = time.monotonic() + self._grace
            late = deadline is not None and time.monotonic() > deadline
            if late or len(self.received) > 1:
                name = signal.Signals(self.received[0]).name
                why = f"they did not end within {self._grace:g} s of {name}"
                if not late:
                    why = "a second signal came"
                print(f"sok_like.run: ranks were killed: {why}", file=sys.stderr, flush=True)
                status = job.kill()
                break
        self._job = None
        return 128 + self.received[0] if self.received and status else status
