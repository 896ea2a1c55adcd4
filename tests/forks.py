"""Processes that begin with TensorFlow loaded: forks of one that has loaded it.

    python tests/forks.py ADDRESS WORDS...   like   python WORDS...

    this file as a program  --- words, environment and open files --->  tests/fork_server.py, which
                            <--- number of the process, its status ---  forks; one of all workers

TensorFlow takes seconds to load, longer than most programs of tests run. No fork is what must show
how a process starts, or runs in namespaces of its own.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
_LAUNCHER = "SOK_TEST_LAUNCHER"  # in the environment of a fork: the process that has asked for it
_SHARED = "SOK_TEST_FORKS"  # in the environment: the address of another process's server
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(*words, **options):
    """`subprocess.run` of `python WORDS...`; its output is text."""
    return subprocess.run(command(*words), capture_output=True, text=True, **options)


def command(*words):
    """A command line that does what `python WORDS...` does, but begins with TensorFlow loaded."""
    from tests.emulated import may_have_device

    if may_have_device():  # which no fork can use
        return [sys.executable, *map(str, words)]
    return [sys.executable, __file__, _address(), *map(str, words)]


def launcher():
    """The number of the process that has started this one, or has asked for it."""
    return int(os.environ.get(_LAUNCHER, os.getppid()))


def share():
    """Has processes that this one starts take its server."""
    os.environ[_SHARED] = _address()


@functools.cache
def _address():
    """Starts this process's server, which ends with it, unless another one's is there."""
    if _SHARED in os.environ:
        return os.environ[_SHARED]
    folder = tempfile.mkdtemp(prefix="sok_forks_")
    atexit.register(shutil.rmtree, folder)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with socket.create_server(f"{folder}/socket", family=socket.AF_UNIX) as listener:
        number = listener.fileno()
        subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(number), str(os.getpid())],
            env={**environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            pass_fds=[number],
        )
    return f"{folder}/socket"


def main(address, *words):
    """Asks for a fork, and ends as it ends; a signal goes to the fork."""
    asked = {"words": words, "folder": os.getcwd(), "environment": {**os.environ}}
    asked["environment"][_LAUNCHER] = str(os.getppid())
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        socket.send_fds(line, [b"f"], [0, 1, 2])
        answers = line.makefile("rw")
        print(json.dumps(asked), file=answers, flush=True)
        fork = int(answers.readline() or sys.exit("there is no server of forks"))
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: os.kill(fork, number))
        status = int(answers.readline() or 1)  # without a word if the server was killed
    if status < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which nobody handles
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
