"""Runs the example programs on the ranks of one launch: starting TensorFlow takes longer."""

import contextlib
import io
import pathlib
import runpy
import sys
import traceback

from tests.docs.together import forget
from tests.ranks import ROOT

EXAMPLES = pathlib.Path(ROOT, "examples")


def run(programs, synthetic):
    """By name what each program has printed, or the trace of its error; and the synthetic models.

    Args:
        programs: names of files in examples/, with the words of their command lines.
        synthetic: the words of `examples/synthetic_models.py`.
    """
    sys.path.insert(0, str(EXAMPLES))
    found = {name: _run(f"{name}.py", words) for name, words in programs.items()}
    forget()
    from tests.examples import synthetic_checks

    return {**found, "synthetic_models": synthetic_checks.run(synthetic)}


def _run(name, words):
    forget()
    sys.argv, printed = [str(EXAMPLES / name), *words], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:  # a program may leave by `sys.exit`, too
        return f"{printed.getvalue()}\n{traceback.format_exc()}"
    return printed.getvalue()
