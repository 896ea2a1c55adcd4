"""Starts a Python program on several ranks of this host:

    python -m sok_like.run -np 2 train.py --epochs 3
    python -m sok_like.run -np 2 -m package.program

The launcher is `mpirun` if Horovod was built with MPI and there is an `mpirun` beside this Python
or on PATH, else `horovodrun --gloo`. Ranks run this Python and inherit the environment. The pool of
TensorFlow has as many threads in each as its share of the cores, unless `TF_NUM_INTRAOP_THREADS` is
set: with a thread per core in every rank, ranks take the cores from each other. There may be more
ranks than cores, and the user may be root. Ctrl-C ends all ranks. The exit status is that of the
first rank that failed, 75 if it waited in vain for a frozen rank; under `horovodrun` it is 1.

This process becomes the launcher, so it need not pass on signals and the exit status. Standard
library only, so it starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys

from sok_like.runtime.launchers import LAUNCHERS, launch_line, search_path


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m sok_like.run",
        description="Starts a Python program on several ranks of this host.",
    )
    parser.add_argument("-np", dest="num_ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="default: the first that works")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a Python file, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the program")
    options = parser.parse_args(argv)
    if options.num_ranks < 1:
        parser.error(f"-np must be a positive integer. Received: -np {options.num_ranks}")
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
    found = {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": str(max(2, share))}
    found = {**found, **{name: os.environ[name] for name in found if name in os.environ}}
    said = " ".join(f"{name}={value}" for name, value in found.items())
    print(f"sok_like.run: {num_ranks} ranks share {cores} cores: {said}", file=sys.stderr)
    return found


def main(argv: list[str] | None = None) -> None:
    """Becomes the launcher, or a single process of Python if one rank is requested."""
    options = _parse(argv)
    environment = {**os.environ, **_share_of_cores(options.num_ranks), "PATH": search_path()}
    command = [sys.executable, *["-m"] * options.module, options.program, *options.arguments]
    if options.num_ranks > 1:
        try:
            command = [*launch_line(options.num_ranks, options.launcher), *command]
        except RuntimeError as error:
            raise SystemExit(f"sok_like.run: {error}") from None
    sys.stdout.flush()
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
