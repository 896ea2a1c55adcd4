"""The order of the packages, read from imports and includes: they may point down only."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

from tests import forks

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Floors of sok_like, bottom to top: a package may import those on lower floors and itself.
FLOORS = [{"runtime"}, {"table", "planner"}, {"saving"}, {"lookup"}]
# Floors of rooms inside a package, bottom to top: folders and modules.
ROOMS = {
    "runtime": [{"checks"}, {"framework", "native"}, {"ranks"}, {"ops"}],
    "saving": [
        {"format"},
        {"parts"},
        {"transaction", "background", "history"},
        {"saver", "containers"},
    ],
}
# Every other package is a front door above all floors. It knows no other door, but for these:
DOORS: dict[str, set[str]] = {
    # TableMetrics writes what `sok.report` measures; ServeWhileTraining exports.
    "callbacks": {"inspection", "serving"},
    # An estimate needs the slot rows of an optimizer's rule.
    "inspection": {"optimizers"},
    # SOK's paths of what the other doors have.
    "core": {"optimizers"},
    "tf_distributed_embedding": {"embeddings"},
    "tf": {"optimizers"},
    # Its optimizer is over the families' adapters, and chooses among the stages.
    "dist_model_parallel": {"optimizers"},
    # A column looks its group up as one group of tables.
    "feature_column": {"group_embedding"},
    # Its rules say what each layer of the other doors does under a mesh.
    "distribution": {"embeddings", "dist_model_parallel", "optimizers"},
    # Names of SOK 2.x, and of DeepRec, of what the other doors have.
    "sok2": {"group_embedding", "optimizers"},
    "deeprec": {"feature_column", "group_embedding", "optimizers"},
}
# `runtime.checks` is the one module below `planner`.
STANDARD_LIBRARY_ONLY = (
    "sok_like/planner/",
    "sok_like/runtime/checks.py",
    "sok_like/table/policies.py",
    "sok_like/runtime/ranks/launchers.py",
    "sok_like/run.py",
    "sok_like/install_horovod.py",
)
ABOVE_THE_PACKAGE = {"examples", "benchmarks", "tests"}

# Folder of a C++ file -> folders it may include. cpu and cuda are two backends that do not know
# each other, and the edges (tf, python) know the core only.
CUDA = "cpp/core/cuda"
# Rooms of the CUDA backend, from the floor up; those of one row do not know each other.
CUDA_FLOORS = [["device"], ["index"], ["rows"], ["lookup", "policies"], ["table"], ["update"]]
CUDA_MAY_INCLUDE = {
    f"{CUDA}/{room}": {"cpp/core", f"{CUDA}/{room}"}
    | {f"{CUDA}/{below}" for floor in CUDA_FLOORS[:row] for below in floor}
    for row, rooms in enumerate(CUDA_FLOORS)
    for room in rooms
}
CORE = {"cpp/core", "cpp/core/cpu", *CUDA_MAY_INCLUDE}
CPP_MAY_INCLUDE = {
    "cpp": set(),
    "cpp/core": {"cpp/core"},
    "cpp/core/cpu": {"cpp/core", "cpp/core/cpu"},
    **CUDA_MAY_INCLUDE,
    "cpp/mpi": {"cpp/mpi"},
    "cpp/tf": CORE | {"cpp/tf"},
    "cpp/python": CORE | {"cpp/python"},
    "cpp/tests": CORE | {"cpp/python", "cpp/tf", "cpp/tests"},  # the emulator stands in for TF too
}
# Start of a foreign header's name -> the folders that may know it.
CPP_FOREIGN = {
    "tensorflow/": {"cpp/mpi", "cpp/tf"},
    "xla/": {"cpp/tf"},  # comes with TensorFlow
    "third_party/gpus/": {"cpp/tf"},
    "absl/": {"cpp/tf"},  # comes with TensorFlow
    "pybind11/": {"cpp/python", "cpp/tests"},  # the emulated tables are a Python module, too
    "Python.h": {"cpp/python"},
    "cuda": {*CUDA_MAY_INCLUDE, "cpp/tf", "cpp/tests"},  # the emulator has some of its headers
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
            # `from sok_like import table` names a package, `from ...ops import f` a member.
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0]
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            if isinstance(parts[0], ast.Constant):  # of an f-string the beginning
                yield parts[0].value.rstrip(".")


def may_import(package, target):
    """Whether a module of `sok_like.<package>` may import `sok_like.<target>`."""
    floor = {name: row for row, names in enumerate(FLOORS) for name in names}
    if target == package:
        return True
    if target in floor:
        return floor[target] < floor.get(package, len(FLOORS))
    return target in DOORS.get(package, set())


def may_enter(name, imported):
    """Whether a file of a package with rooms may import `imported`, a name of sok_like."""
    _, package, room, *_ = pathlib.PurePath(name).with_suffix("").parts
    target = imported.removeprefix(f"{package}.").partition(".")[0]
    floor = {each: row for row, rooms in enumerate(ROOMS[package]) for each in rooms}
    return target not in floor or target == room or floor[target] < floor.get(room, 0)


def python_faults(name, source):
    """Returns a sentence for each import of a file of sok_like that points upward."""
    package = pathlib.PurePath(name).with_suffix("").parts[1]
    if package in {"__init__", "__main__"}:  # lists public names; tries them: above all packages
        return []
    faults = []
    for imported in imported_names(name, source):
        top, _, rest = imported.partition(".")
        target = rest.partition(".")[0]
        if top in ABOVE_THE_PACKAGE:
            faults.append(f"{name} imports {imported}, which stands above the package")
        elif top != "sok_like":
            if name.startswith(STANDARD_LIBRARY_ONLY) and top not in sys.stdlib_module_names:
                faults.append(f"{name} imports {imported}: only the standard library is allowed")
        elif target == "_core" and name == "sok_like/runtime/native/libraries.py":
            continue
        elif target == "_core":
            faults.append(f"{name} imports {imported}: libraries.core() loads it")
        elif not may_import(package, target):
            faults.append(f"{name} imports {imported}, which does not stand below it")
        elif package == target and package in ROOMS and not may_enter(name, rest):
            faults.append(f"{name} imports {imported}, which does not stand below it")
        elif package == "planner" and target == "runtime" and ".checks" not in imported:
            faults.append(f"{name} imports {imported}: only the standard library is allowed")
    return faults


def circles(sources):
    """Returns the modules on a circle of imports, from sources by name of file."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in sources
    }
    imports = {}
    for module, name in modules.items():
        found = set(imported_names(name, sources[name]))
        found |= {each.rpartition(".")[0] for each in found if each not in modules}
        imports[module] = found & set(modules) - {module}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return sorted({*error.args[1]})
    return []


def test_no_modules_import_each_other():
    files = [name for name in tracked_files() if re.fullmatch(r"sok_like/.*\.py", name)]
    assert circles({name: (ROOT / name).read_text() for name in files}) == []


def test_that_check_finds_circles():
    a, b, c = "sok_like/lookup/a.py", "sok_like/lookup/b.py", "sok_like/lookup/c.py"
    chain = {a: "from sok_like.lookup import b", b: "from sok_like.lookup.c import f", c: "f = 1"}
    assert circles(chain) == []
    within = "def g():\n    import importlib\n    importlib.import_module('sok_like.lookup.a')"
    assert circles({**chain, c: within}) == [f"sok_like.lookup.{name}" for name in "abc"]


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


@pytest.mark.parametrize(
    "pattern, faults_of",
    [(r"sok_like/.*\.py", python_faults), (r"cpp/.*\.(h|cc|cu|cuh)", cpp_faults)],
)
def test_imports_and_includes_point_down(pattern, faults_of):
    files = [name for name in tracked_files() if re.fullmatch(pattern, name)]
    assert files
    assert [fault for name in files for fault in faults_of(name, (ROOT / name).read_text())] == []


def test_the_document_names_the_packages_that_exist():
    document = (ROOT / "docs" / "architecture.md").read_text()
    picture = document.partition("```text")[2].partition("```")[0].partition("cpp/tf/")[0]
    named = set(re.findall(r"^    (\w+)(?=[/ ])", picture, re.M))
    exist = {
        pathlib.PurePath(name).parts[1] for name in tracked_files() if name.startswith("sok_like/")
    }
    exist = {name.removesuffix(".py") for name in exist if not name.startswith("_")} - {"py.typed"}
    assert named == exist


@pytest.mark.parametrize(
    "name, source, fault",
    [
        ("sok_like/runtime/ops.py", "from sok_like import lookup", "not stand below"),
        ("sok_like/runtime/ops.py", "def f():\n  from ..table.keys import V", "not stand below"),
        ("sok_like/runtime/native/a.py", "from sok_like.runtime import ops", "not stand below"),
        ("sok_like/runtime/ranks/a.py", "from sok_like.runtime.native import devices", None),
        ("sok_like/saving/format/a.py", "from sok_like.saving.parts import b", "not stand below"),
        ("sok_like/saving/saver.py", "from sok_like.saving import background", None),
        ("sok_like/embeddings/a.py", "from ..lookup import exchange\nfrom . import b", None),
        ("sok_like/embeddings/a.py", "from sok_like.optimizers.adam import A", "not stand below"),
        ("sok_like/feature_column/a.py", "from sok_like.group_embedding.b import f", None),
        ("sok_like/lookup/hash_lookup.py", "import sok_like", "not stand below"),
        (
            "sok_like/table/variable.py",
            "import importlib\nimportlib.import_module(f'sok_like.lookup.{name}')",
            "not stand below",
        ),
        ("sok_like/lookup/hash_lookup.py", "from sok_like import _core", "libraries.core"),
        ("sok_like/planner/a.py", "import numpy", "standard library"),
        ("sok_like/planner/a.py", "from sok_like.runtime.checks import as_integer", None),
        ("sok_like/planner/a.py", "from sok_like.runtime.ranks import comm", "standard library"),
        ("sok_like/table/variable.py", "import benchmarks.x", "above the package"),
        ("sok_like/surprise.py", "from sok_like.embeddings import a", "not stand below"),
        ("cpp/core/cuda/table/a.cu", '  # include "cpp/core/cpu/a.h"', "not stand below"),
        ("cpp/core/cuda/table/a.cu", '#include "cpp/core/cuda/rows/a.h"', None),
        ("cpp/core/cuda/a.cu", "#include <cuda_runtime.h>", "known to"),  # in no room
        ("cpp/tf/a.cc", '#include "tensorflow/core/x.h"\n#include "cpp/core/cpu/a.h"', None),
        ("cpp/tf/a.cc", '#include "a.h"', "from the root"),
        ("cpp/mpi/a.cc", '#include "cpp/core/table.h"', "not stand below"),
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


def test_no_bytes_of_another_process_become_code():
    words = r"import pickle|pickle\.loads?\(|(allgather|broadcast)_object|allow_pickle=True"
    sources = [n for n in tracked_files() if n.endswith(".py") and not n.startswith("tests/")]
    found = [name for name in sources if re.search(words, (ROOT / name).read_text())]
    assert len(sources) > 100 and found == []


def test_import_does_no_work():
    program = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import sok_like\n"
        "assert dict(os.environ) == before, 'the environment was changed'\n"
        "import sok_like.table.variable\n"
        "changed = {k for k in {*os.environ, *before} if os.environ.get(k) != before.get(k)}\n"
        "ours = {k for k in changed if k.startswith(('TF_', 'CUDA', 'NCCL'))}\n"
        "assert ours == set(), ours\n"
        "print(sorted({'horovod', 'sok_like._core'} & set(sys.modules)))"
    )
    done = forks.run("-c", program)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_no_kernel_is_final():
    """The thread sanitizer's build derives from each (cpp/tf/tsan_edges.h)."""
    final = re.compile(r"class (\w+) final : public OpKernel")
    sources = [*(ROOT / "cpp" / "tf").rglob("*.h"), *(ROOT / "cpp" / "tf").rglob("*.cc")]
    assert len(sources) > 40
    assert not [name for file in sources for name in final.findall(file.read_text())]
