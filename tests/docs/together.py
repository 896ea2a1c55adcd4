"""Runs programs of the documents one after the other in one process.

Starting TensorFlow takes longer than most of them. Each starts in a namespace of its own, without
`Init`, distribution, and embeddings that are known by name.
"""

import contextlib
import io
import json
import pathlib
import sys
import traceback

from tests import cores
from tests.ready_ranks import forget


def run(programs):
    """By the first file of each program, a list of paths: the trace of an error, and its output."""
    return {paths[0]: _run(paths) for paths in programs}


def _run(paths):
    forget()
    namespace, printed = {"__name__": "__main__"}, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for path in paths:  # files, so that TensorFlow finds the source
                exec(compile(pathlib.Path(path).read_text(), path, "exec"), namespace)
    except BaseException:
        return traceback.format_exc(), printed.getvalue()
    return "", printed.getvalue()


if __name__ == "__main__":
    cores.collect_seldom()
    programs, results = sys.argv[1:]
    pathlib.Path(results).write_text(json.dumps(run(json.loads(programs))))
