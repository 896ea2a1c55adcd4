"""Starts a Python program on several ranks of this host:

    python -m sok_like.run -np 2 train.py --epochs 3
    python -m sok_like.run -np 2 -m package.program

The launcher is `mpirun`, beside this Python or on PATH, if there is a library of MPI or Horovod
was built with it; else `horovodrun --gloo`. Ranks run this Python and inherit the environment. The
pool of TensorFlow has as many threads in each as its share of the cores, unless
`TF_NUM_INTRAOP_THREADS` is set: with a thread per core in every rank, ranks take the cores from
each other. There may be more ranks than cores, and the user may be root. Ctrl-C ends all ranks.
The exit status is that of the first rank that failed, 75 if Horovod waited in vain for a frozen
rank; under `horovodrun` it is 1. This process becomes the launcher, so it need not pass on signals
and the exit status.

    python -m sok_like.run -np 4 --restarts 3 train.py

Now it stays. When a rank has died, has been preempted or has failed, the launcher ends the others,
and all are started again, up to 3 times. With `--min-np 2` each restart has one rank fewer, but at
least 2. The program goes on by `sok.callbacks.BackupAndRestore`, or by what it reads itself.
Ctrl-C, SIGTERM and SIGHUP go to the launcher and end all: there is no restart. A program that fails
within 10 seconds of its first start is not started again, because it has made no progress; later
failures use up the restarts. The exit status is that of the last start.

Standard library only, so it starts fast.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from sok_like.runtime.ranks.launchers import LAUNCHERS, launch_line, search_path

_AT_ONCE = 10  # seconds; a start of TensorFlow, and of training, takes longer


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m sok_like.run",
        description="Starts a Python program on several ranks of this host.",
    )
    parser.add_argument("-np", dest="num_ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="default: the first that works")
    parser.add_argument("--restarts", type=int, default=0, help="starts after a rank has died")
    parser.add_argument(
        "--min-np", type=int, help="each restart has a rank fewer, at least so many"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a Python file, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the program")
    options = parser.parse_args(argv)
    if options.num_ranks < 1:
        parser.error(f"-np must be a positive integer. Received: -np {options.num_ranks}")
    if options.restarts < 0:
        parser.error(f"--restarts must be 0 or more. Received: --restarts {options.restarts}")
    least = options.min_np
    if least is not None and not (options.restarts and 1 <= least <= options.num_ranks):
        parser.error(
            f"--min-np needs --restarts, and must be in [1, {options.num_ranks}]. "
            f"Received: --min-np {least} --restarts {options.restarts}"
        )
    if not options.module and not os.path.exists(options.program):
        parser.error(
            "the program must be a Python file, or the name of a module after -m. "
            f"Received: {options.program}, which does not exist"
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
    """The command of a start, and its environment."""
    environment = {**os.environ, **_share_of_cores(num_ranks), "PATH": search_path()}
    command = [sys.executable, *["-m"] * options.module, options.program, *options.arguments]
    if num_ranks > 1:
        try:
            command = [*launch_line(num_ranks, options.launcher), *command]
        except RuntimeError as error:
            raise SystemExit(f"sok_like.run: {error}") from None
    sys.stdout.flush()
    return command, environment


def _run_again(options):
    """Starts the ranks until they end well; returns the status of the last start."""
    received: list[int] = []
    running: list[subprocess.Popen] = []

    def pass_on(number, frame):
        received.append(number)
        for process in running:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status, num_ranks = 0, options.num_ranks
    for left in range(options.restarts, -1, -1):
        command, environment = _prepared(options, num_ranks)
        began = time.monotonic()
        running[:] = [subprocess.Popen(command, env=environment)]
        if received:  # before there was a process that could receive it
            running[0].send_signal(received[-1])
        status, lasted = running[0].wait(), time.monotonic() - began
        status = status if status >= 0 else 128 - status  # as a shell says it
        if status == 0 or received:
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
    """Becomes the launcher, or a single process of Python if one rank is requested."""
    options = _parse(argv)
    if options.restarts:
        raise SystemExit(_run_again(options))
    command, environment = _prepared(options, options.num_ranks)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
