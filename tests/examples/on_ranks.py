"""Runs an example program on ranks that stand ready: starting TensorFlow takes longer."""

import contextlib
import io
import runpy
import sys
import traceback

from tests.ranks import ROOT
from tests.ready_ranks import forget


def run(name, words):
    """What the program has printed; with the trace of its error, if it ends by one."""
    forget()  # `sok.Init`, above all
    path, printed = ROOT / "examples" / f"{name}.py", io.StringIO()
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *words]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:  # a program may leave by `sys.exit`, too
        return f"{printed.getvalue()}\n{traceback.format_exc()}"
    finally:
        sys.path.pop(0)
    return printed.getvalue()
