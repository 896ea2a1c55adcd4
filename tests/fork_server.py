"""The process whose forks begin with TensorFlow loaded (tests/forks.py)."""

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import sys
import tempfile

_ENDS_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def serve(number):
    """Forks for who connects to this socket; returns, in each fork, what it asks for."""
    import tensorflow as tf

    assert tf.keras.layers  # loads Keras
    gc.collect()
    gc.freeze()  # so that forks share its memory
    with socket.socket(fileno=number) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    line = listener.accept()[0]
                    _, files, *_ = socket.recv_fds(line, 1, 3)
                    asked = json.loads(line.makefile().readline())
                    fork = os.fork()
                    if fork == 0:
                        return asked, files
                    for file in files:
                        os.close(file)
                    line.sendall(b"%d\n" % fork)
                    selector.register(line, selectors.EVENT_READ, fork)  # readable at its end
                    selector.register(os.pidfd_open(fork), selectors.EVENT_READ, (fork, line))
                elif isinstance(key.data, int):
                    with contextlib.suppress(KeyError, ValueError):  # it has just ended itself
                        selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)
                else:
                    fork, line = key.data
                    _, status = os.waitpid(fork, 0)
                    with contextlib.suppress(OSError, KeyError):
                        selector.unregister(line)
                        line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                    line.close()
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)


def _end_with(parent):
    ctypes.CDLL(None).prctl(_ENDS_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def main(listener, parent):
    _end_with(int(parent))
    server = os.getpid()
    asked, files = serve(int(listener))
    _end_with(server)
    for number, file in enumerate(files):
        os.dup2(file, number, inheritable=True)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    tempfile.tempdir = None  # it depends on the environment
    kind, *words = asked["words"]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *words], str(pathlib.Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
