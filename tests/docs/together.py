"""Runs programs of documents and examples one after the other in one process.

Starting TensorFlow takes longer than most of them. Each starts in a namespace of its own, without
`Init`, distribution, and embeddings that are known by name.
"""

import contextlib
import io
import json
import pathlib
import sys
import traceback

from tests import speed
from tests.ready_ranks import forget


def run(programs):
    """By the first file of each program, a list of paths: the trace of an error, and its output."""
    return {paths[0]: run_program(paths) for paths in programs}


def run_program(paths, *words):
    """The trace of an error of a program of several files with these arguments, and its output."""
    forget()
    sources = {path: pathlib.Path(path).read_text() for path in paths}
    # No program needs them unless it imports them itself.
    absent = {"horovod", "mpi4py"} - set(sys.modules)
    absent = [name for name in absent if not any(name in text for text in sources.values())]
    sys.modules.update(dict.fromkeys(absent))
    namespace, printed = {"__name__": "__main__", "__file__": paths[0]}, io.StringIO()
    sys.argv = [paths[0], *words]
    sys.path.insert(0, str(pathlib.Path(paths[0]).parent))
    try:
        with contextlib.redirect_stdout(printed):
            for path, text in sources.items():  # files, so that TensorFlow finds the source
                exec(compile(text, path, "exec"), namespace)
    except BaseException:  # a program may leave by `sys.exit`, too
        return traceback.format_exc(), printed.getvalue()
    finally:
        sys.path.pop(0)
        for name in absent:
            del sys.modules[name]
    return "", printed.getvalue()


if __name__ == "__main__":
    speed.collect_seldom()
    programs, results = sys.argv[1:]
    pathlib.Path(results).write_text(json.dumps(run(json.loads(programs))))
