"""Starts a Python program on several ranks, of this host or of several:

    python -m sok_like.run -np 2 train.py --epochs 3
    python -m sok_like.run -np 2 -m package.program

    python -m sok_like.run -np 4 --restarts 3 --min-np 2 train.py
    python -m sok_like.run -np 8 -H host1:4,host2:4 train.py

The launcher is `mpirun`, beside this Python or on PATH, if there is a library of MPI or Horovod
was built with it; else `horovodrun --gloo`. docs/install.md tells what ranks inherit,
docs/online_learning.md what signals and restarts do, docs/guides/several_ranks.md how other hosts
are reached. With a thread per core in every rank, ranks would take the cores from each other, so
each has its share. The exit status is that of the first rank that failed in the last start, 75 if
Horovod waited in vain for a frozen rank; under `horovodrun` it is 1. After a signal it is 143
(SIGTERM) or 130 (Ctrl-C), or 0 if all ranks ended well; there is no restart then.

    sok_like.run    gets a signal, and hands it to the ranks
      mpirun        in a session of its own: it would kill the ranks as soon as it got the signal
        ranks       save, and end; mpirun ends when they have
    If a parent is killed, Linux ends its child: mpirun by SIGTERM, a rank by SIGKILL.

Standard library only, so it starts fast.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sok_like.runtime.ranks.launchers import LAUNCHERS, launch_line, search_path

_HOSTS = re.compile(r"[\w.-]+(:[1-9]\d*)?(,[\w.-]+(:[1-9]\d*)?)*")
_AT_ONCE = 10  # seconds; a start of TensorFlow, and of training, takes longer
# A program that becomes another one, behind prctl(PR_SET_PDEATHSIG, number).
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_LAUNCHER_ENDS = 5.0  # seconds; mpirun takes one to end after its ranks


def bound(command: Sequence[str], number: int) -> list[str]:
    """The command, whose process gets the signal `number` when its parent ends in any way."""
    return [sys.executable, "-S", "-c", _BOUND, str(int(number)), *command]


class Job:
    """The ranks of a job, and the signals that end it: ranks have `grace` seconds to end."""

    def __init__(self, grace: float):
        self.received: list[int] = []
        self._grace = grace
        self._process: Any = None  # the launcher, or the only rank
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGTSTP, self._pause)

    def run(self, launch: Sequence[str], command: list[str], environment: dict[str, str]) -> int:
        """Starts the ranks, by `launch` if that is needed; their status, 128 + signal after one."""
        self._command, self._needs_launcher = command, bool(launch)
        self._told: set[int] = set()  # who has had the signal that ends the job
        line, deadline = bound(command, signal.SIGKILL), None
        if launch:
            line = bound([*launch, *line], signal.SIGTERM)
        self._process = subprocess.Popen(line, env=environment, start_new_session=True)
        while (status := self._wait(0.2)) is None:
            if self.received:
                self._tell()  # again, as a busy host may show a rank late
                deadline = deadline or time.monotonic() + self._grace
            late = deadline is not None and time.monotonic() > deadline
            if late or len(self.received) > 1:
                name = signal.Signals(self.received[0]).name
                slow = f"they did not end within {self._grace:g} s of {name}"
                why = slow if late else "a second signal came"
                print(f"sok_like.run: ranks were killed: {why}", file=sys.stderr, flush=True)
                status = self._kill()
                break
        self._process = None
        return 128 + self.received[0] if self.received and status else status

    def _receive(self, number, frame):
        self.received.append(number)
        if len(self.received) == 1:
            self._tell()

    def _tell(self):
        # SIGHUP, of a terminal that was closed, would end Python without a backup.
        number = self.received[0]
        self._send(signal.SIGTERM if number == signal.SIGHUP else number, once=True)

    def _pause(self, number, frame):
        """Ctrl-Z: ranks are in another session, which no terminal stops."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)  # somebody has continued this process

    def _send(self, number, once=False):
        """Sends a signal to the ranks, those on other hosts get none; `once`: to each only once."""
        if self._process is None:
            return
        ranks = self._ranks()
        if not ranks and not (once and self._told):
            # Without ranks here the launcher gets it, which ends those elsewhere.
            ranks = [self._process.pid]
        for pid in ranks:
            if not (once and pid in self._told):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if once:
            self._told.update(ranks)

    def _wait(self, seconds):
        """The status, as a shell says it; None if ranks still run after so many seconds."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else 128 - status

    def _kill(self):
        """Ends the ranks at once; returns the status."""
        self._send(signal.SIGKILL)
        self._process.terminate()
        while (status := self._wait(_LAUNCHER_ENDS)) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return status

    def _ranks(self):
        """The processes below the launcher that run the command, without children of theirs."""
        if not self._needs_launcher:
            return [self._process.pid]
        children, words = defaultdict(list), {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                line = os.fsdecode((process / "cmdline").read_bytes())
                words[int(process.name)] = line.split("\0")[:-1]
                children[int(parent)].append(int(process.name))
        ranks, others = [], children[self._process.pid]
        while others:
            pid = others.pop()
            if words[pid][-len(self._command) :] == self._command:
                ranks.append(pid)
            else:
                others += children[pid]
        return ranks


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m sok_like.run", description="Starts a Python program on several ranks."
    )
    parser.add_argument("-np", dest="num_ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="default: the first that works")
    parser.add_argument("-H", dest="hosts", help="hosts with their ranks: host1:4,host2:4")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds that ranks have to end after a signal"
    )
    parser.add_argument("--restarts", type=int, default=0, help="starts after a rank has died")
    parser.add_argument("--min-np", type=int, help="each restart has a rank fewer, but so many")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a Python file, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the program")
    options = parser.parse_args(argv)

    def require(fits, required, received):
        if not fits:
            parser.error(f"{required}. Received: {received}")

    num_ranks, restarts, least = options.num_ranks, options.restarts, options.min_np
    require(num_ranks >= 1, "-np must be a positive integer", f"-np {num_ranks}")
    require(restarts >= 0, "--restarts must be 0 or more", f"--restarts {restarts}")
    require(options.grace >= 0, "--grace must be 0 or more seconds", f"--grace {options.grace}")
    require(
        options.hosts is None or _HOSTS.fullmatch(options.hosts),
        "-H must name hosts, each with its number of ranks, such as host1:4,host2:4",
        f"-H {options.hosts}",
    )
    require(
        least is None or (restarts and 1 <= least <= num_ranks),
        f"--min-np needs --restarts, and must be in [1, {num_ranks}]",
        f"--min-np {least} --restarts {restarts}",
    )
    require(
        options.module or os.path.exists(options.program),
        "the program must be a Python file, or the name of a module after -m",
        f"{options.program}, which does not exist",
    )
    return options


def _share_of_cores(num_ranks):
    """The size of TensorFlow's pools for each rank; nothing if the user chose one."""
    cores = len(os.sched_getaffinity(0))
    if num_ranks == 1 or cores == 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return {}
    share = max(1, cores // num_ranks)
    # An op that waits keeps a thread of the other pool, so one would be too few there.
    pools = {"TF_NUM_INTRAOP_THREADS": share, "TF_NUM_INTEROP_THREADS": max(2, share)}
    variables = {name: os.environ.get(name, str(threads)) for name, threads in pools.items()}
    listed = " ".join(f"{name}={value}" for name, value in variables.items())
    print(f"sok_like.run: {num_ranks} ranks share {cores} cores: {listed}", file=sys.stderr)
    return variables


def _prepared(options, num_ranks):
    """The launcher with its options, the command of a rank, and the environment of both."""
    hosts = options.hosts
    slots = [int(host.partition(":")[2] or 1) for host in (hosts or "").split(",")]
    environment = {
        **os.environ,
        **_share_of_cores(min(num_ranks, max(slots)) if hosts else num_ranks),
        "PATH": search_path(),
    }
    command = [sys.executable, *["-m"] * options.module, options.program, *options.arguments]
    launch = []
    if num_ranks > 1 or hosts:
        try:
            launch = launch_line(num_ranks, options.launcher, hosts, environment)
        except RuntimeError as error:
            raise SystemExit(f"sok_like.run: {error}") from None
    sys.stdout.flush()
    return launch, command, environment


def _run(options):
    """Starts the ranks until they end well; returns the status of the last start."""
    job = Job(options.grace)
    status, num_ranks = 0, options.num_ranks
    for left in range(options.restarts, -1, -1):
        began = time.monotonic()
        status = job.run(*_prepared(options, num_ranks))
        lasted = time.monotonic() - began
        if status == 0 or job.received or not options.restarts:
            break
        ended = f"sok_like.run: {num_ranks} ranks ended with status {status} after {lasted:.0f} s"
        at_once = left == options.restarts and lasted < _AT_ONCE
        if at_once or not left:
            why = f"it failed within {_AT_ONCE} s" if at_once else "no restarts are left"
            print(f"{ended}; not started again: {why}", file=sys.stderr, flush=True)
            break
        num_ranks = max(options.min_np or num_ranks, num_ranks - 1)
        again = f"starting {num_ranks} again, {left - 1} restarts left"
        print(f"{ended}; {again}", file=sys.stderr, flush=True)
    return status


def main(argv: list[str] | None = None) -> None:
    """Runs the ranks, or becomes the program if one rank is requested."""
    options = _parse(argv)
    if options.num_ranks == 1 and not (options.restarts or options.hosts):
        _, command, environment = _prepared(options, 1)
        os.execve(command[0], command, environment)
    # Open MPI names its folder by mpirun's process number, and does not start where a killed mpirun
    # has left one of that number. In containers numbers come back at every start.
    with tempfile.TemporaryDirectory(prefix="sok_like_run_", ignore_cleanup_errors=True) as folder:
        if not any(re.fullmatch("PRTE_MCA_prte_.*tmpdir_base", name) for name in os.environ):
            os.environ["PRTE_MCA_prte_local_tmpdir_base"] = folder
        raise SystemExit(_run(options))


if __name__ == "__main__":
    main()
