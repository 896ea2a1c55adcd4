"""What an environment that lacks something is told, and what a built package holds."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(program):
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)


def test_without_tensorflow_the_line_to_type_is_said():
    done = run(
        "import sys, warnings\n"
        "sys.modules['tensorflow'] = None  # as if it were not installed\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import sok_like\n"
        "print(*(w.message for w in caught))\n"
        "try: sok_like.Init\n"
        "except ImportError as error: print(error)\n"
        "from sok_like.planner import strategy  # works without\n"
    )
    assert done.returncode == 0, done.stderr
    at_import, at_use = done.stdout.splitlines()
    line = re.search(r"Type: pip install (tensorflow-cpu==[\d.]+)$", at_import)
    assert line and at_use == at_import
    assert f'"{line[1]}"' in (ROOT / "pyproject.toml").read_text()


def test_an_old_setuptools_is_named():
    done = run(
        "import setuptools, runpy\n"
        "setuptools.__version__ = '65.5.0'\n"
        "setuptools.setup = lambda **_: print('built')\n"
        "runpy.run_path('setup.py')"
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "Received: setuptools 65.5.0" in done.stderr
    assert 'pip install "setuptools>=77,<80"' in done.stderr


def test_the_marker_of_types_exists():
    assert (ROOT / "sok_like" / "py.typed").is_file()
