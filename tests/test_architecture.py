"""The order of the layers, read from imports and includes: an arrow may point down only."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Modules of sok_like, bottom to top: each may import lower rows and itself. A module that is listed
# and not written yet is no fault; one that exists and is not listed is.
PYTHON_LAYERS = [
    {"native", "policies"},
    {"devices"},
    {"ops", "comm", "planner", "initializers", "dump_file", "keys"},
    {"key_records", "snapshots"},
    {"variable", "core"},
    {"lookup", "keras_variable", "rows"},
    {
        *("layers", "embeddings", "group_embedding", "dist_model_parallel", "distribution"),
        *("checkpoint", "serving", "optimizers", "tf", "deeprec", "feature_column"),
    },
]
# In the top row a front door may use what stands beside it, as a layer its optimizer scope.
TOP = len(PYTHON_LAYERS) - 1
STANDARD_LIBRARY_ONLY = {"planner", "policies"}
ABOVE_THE_PACKAGE = {"examples", "benchmarks", "tests"}

# Folder of a C++ file -> folders it may include. cpu and cuda are two backends that do not know
# each other, and the edges (tf, python) know the core only.
CORE = {"cpp/core", "cpp/core/cpu", "cpp/core/cuda"}
CPP_MAY_INCLUDE = {
    "cpp": set(),
    "cpp/core": {"cpp/core"},
    "cpp/core/cpu": {"cpp/core", "cpp/core/cpu"},
    "cpp/core/cuda": {"cpp/core", "cpp/core/cuda"},
    "cpp/tf": CORE | {"cpp/tf"},
    "cpp/python": CORE | {"cpp/python"},
    "cpp/tests": CORE | {"cpp/python", "cpp/tf", "cpp/tests"},  # the emulator stands in for TF too
}
# Start of a foreign header's name -> the folders that may know it.
CPP_FOREIGN = {
    "tensorflow/": {"cpp/tf"},
    "xla/": {"cpp/tf"},  # comes with TensorFlow
    "third_party/gpus/": {"cpp/tf"},
    "absl/": {"cpp/tf"},  # comes with TensorFlow
    "pybind11/": {"cpp/python"},
    "Python.h": {"cpp/python"},
    "cuda": {"cpp/core/cuda", "cpp/tf"},
}

MAX_LINES = 500
CODE = {".py", ".pyi", ".cc", ".h", ".cu", ".cuh", ".sh", ".cmake"}
MACHINE_PATH = re.compile(r"(?<![\w.$}~*])/(work|root|home|Users|tmp|mnt)/\w+")


def tracked_files():
    """Returns the paths, from the root, of all files that belong to the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def imported_names(name, source):
    """Yields the absolute dotted names that the Python file called `name` imports anywhere."""
    package = pathlib.PurePath(name).parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = [*base, *([node.module] if node.module else [])]
            # `from sok_like import ops` names a module, `from sok_like.ops import f` a member.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def row_of(module):
    return next((row for row, modules in enumerate(PYTHON_LAYERS) if module in modules), None)


def python_faults(name, source):
    """Returns a sentence for each import of a file of sok_like that points upward."""
    module = pathlib.PurePath(name).with_suffix("").parts[1]
    if module == "__init__":  # lists public names, so it stands above all modules
        return []
    row = row_of(module)
    if row is None:
        return [f"{name}: place '{module}' in PYTHON_LAYERS of tests/test_architecture.py"]
    faults = []
    for imported in imported_names(name, source):
        top, _, rest = imported.partition(".")
        target = rest.partition(".")[0]
        if top in ABOVE_THE_PACKAGE:
            faults.append(f"{name} imports {imported}, which stands above the package")
        elif top != "sok_like":
            if module in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
                faults.append(f"{name} imports {imported}: only the standard library is allowed")
        elif target == "_core":
            faults.append(f"{name} imports {imported}: native.core() loads it")
        elif row_of(target) is None:
            faults.append(f"{name} imports {imported}, which is no module of PYTHON_LAYERS")
        elif target != module and row_of(target) >= row and row < TOP:
            faults.append(f"{name} imports {imported}, which does not stand below it")
    return faults


def cpp_folder(name):
    parents = (str(parent) for parent in pathlib.PurePath(name).parents)
    return next((parent for parent in parents if parent in CPP_MAY_INCLUDE), None)


def cpp_faults(name, source):
    """Returns a sentence for each include of a C++ file that points upward."""
    folder = cpp_folder(name)
    faults = []
    for bracket, header in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)', source, re.M):
        knowing = [folders for start, folders in CPP_FOREIGN.items() if header.startswith(start)]
        if knowing and folder not in knowing[0]:
            faults.append(f"{name} includes {header}, known to {sorted(knowing[0])} only")
        elif header.startswith("cpp/") and cpp_folder(header) not in CPP_MAY_INCLUDE[folder]:
            faults.append(f"{name} includes {header}, which does not stand below it")
        elif bracket == '"' and not knowing and not header.startswith("cpp/"):
            faults.append(f'{name} includes "{header}": write its path from the root')
    return faults


def test_python_imports_point_down():
    files = [name for name in tracked_files() if re.fullmatch(r"sok_like/.*\.py", name)]
    assert files
    assert [
        fault for name in files for fault in python_faults(name, (ROOT / name).read_text())
    ] == []


def test_cpp_includes_point_down():
    files = [name for name in tracked_files() if re.fullmatch(r"cpp/.*\.(h|cc|cu|cuh)", name)]
    assert files
    assert [fault for name in files for fault in cpp_faults(name, (ROOT / name).read_text())] == []


@pytest.mark.parametrize(
    "name, source, fault",
    [
        ("sok_like/ops.py", "from sok_like import native\nimport tensorflow", None),
        ("sok_like/ops.py", "from sok_like import lookup", "not stand below"),
        ("sok_like/ops.py", "from . import comm", "not stand below"),
        ("sok_like/ops.py", "def f():\n  from .variable import V", "not stand below"),
        ("sok_like/layers/a.py", "from ..optimizers import Adam\nfrom . import b", None),
        ("sok_like/lookup.py", "from sok_like.layers.a import A", "not stand below"),
        ("sok_like/lookup.py", "import sok_like", "no module of"),
        ("sok_like/lookup.py", "from sok_like import _core", "native.core"),
        ("sok_like/planner.py", "import numpy", "standard library"),
        ("sok_like/variable.py", "import benchmarks.x", "above the package"),
        ("sok_like/surprise.py", "", "place 'surprise'"),
        ("cpp/core/cpu/a.h", '#include "cpp/core/parallel.h"\n#include <vector>', None),
        ("cpp/core/cpu/a.h", '#include "cpp/core/cuda/a.h"', "not stand below"),
        ("cpp/core/cuda/a.cu", '  # include "cpp/core/cpu/a.h"', "not stand below"),
        ("cpp/core/a.cc", '#include "tensorflow/core/x.h"', "known to"),
        ("cpp/core/a.cc", "#include <Python.h>", "known to"),
        ("cpp/core/a.cc", '#include "cpp/tf/a.h"', "not stand below"),
        ("cpp/tf/a.cc", '#include "cpp/python/a.h"', "not stand below"),
        ("cpp/tf/a.cc", '#include "tensorflow/core/x.h"\n#include "cpp/core/cpu/a.h"', None),
        ("cpp/tf/a.cc", '#include "a.h"', "from the root"),
    ],
)
def test_this_check_finds_faults(name, source, fault):
    faults = (python_faults if name.endswith(".py") else cpp_faults)(name, source)
    assert (faults == []) if fault is None else (len(faults) == 1 and fault in faults[0])


def test_files_are_short():
    code = [name for name in tracked_files() if pathlib.PurePath(name).suffix in CODE]
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in code}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_file_names_a_path_of_one_machine():
    found = {}
    for name in tracked_files():
        try:
            match = MACHINE_PATH.search((ROOT / name).read_text())
        except UnicodeDecodeError:  # a picture
            continue
        if match:
            found[name] = match[0]
    assert found == {}


def test_import_does_no_work():
    if not (ROOT / "sok_like" / "__init__.py").exists():
        pytest.skip("the package has no __init__.py")
    program = (
        "import os, sys, tensorflow\n"
        "before = dict(os.environ)\n"
        "import sok_like\n"
        "assert dict(os.environ) == before, 'the environment was changed'\n"
        "print(sorted({'horovod', 'sok_like._core'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
