"""What one rank of `tests.ranks.run_ranks` runs: python -m tests.rank_main TARGET FOLDER ARGS"""

import importlib
import json
import os
import pathlib
import pickle
import sys
import traceback

from tests import emulated, speed


def rank_of_process():
    """That of this process."""
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("tests.rank_main must be started by mpirun or horovodrun")


def _run(target, args):
    if emulated.asked_for():
        emulated.install()
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(**(args or {}))


def main():
    speed.collect_seldom()
    target, folder, args = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
    rank = rank_of_process()
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    log = folder / f"rank{rank}.log"
    # At the level of file descriptors, because the C++ side writes too.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        result = pickle.dumps(_run(target, args))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: leaving normally waits for the other ranks in MPI's finalizer, and they may
        # be waiting for this one.
        os._exit(1)
    # Written aside and renamed: a rank killed while writing leaves no half result.
    aside = folder / f"rank{rank}.aside"
    aside.write_bytes(result)
    aside.rename(folder / f"rank{rank}.pickle")


if __name__ == "__main__":
    main()
