"""How ranks are started: Horovod's transports, their launchers, and the launch command.

Standard library only. Horovod's files are inspected but never loaded: loading takes seconds.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import pathlib
import shutil
import subprocess
import sys

LAUNCHERS = ("mpirun", "gloo")
NO_HOROVOD = (
    "More than one process needs Horovod, which is not installed. "
    "Type: python -m sok_like.install_horovod"
)


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
    found = [file for f in folders or () for file in pathlib.Path(f).glob("tensorflow/mpi_lib*.so")]
    return found[0] if found else None


def horovod_transports() -> list[str]:
    """Launchers that the installed Horovod supports, according to its library's file."""
    library = horovod_library()
    if library is None:
        return []
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_,
    ):
        marks = {"mpirun": b"MPIController", "gloo": b"GlooController"}
        return [name for name in LAUNCHERS if bytes_.find(marks[name]) >= 0]


def launch_line(num_ranks: int, launcher: str | None = None) -> list[str]:
    """The words to put before a command to run it on `num_ranks` ranks of this host.

    Args:
        launcher: `"mpirun"`, `"gloo"`, or None to choose.
    """
    transports = horovod_transports()
    if not transports:
        raise RuntimeError(NO_HOROVOD)
    programs = {"mpirun": find_program("mpirun"), "gloo": find_program("horovodrun")}
    usable = [name for name in transports if programs[name]]
    if launcher is None and not usable:
        raise RuntimeError(f"No launcher was found for Horovod, which was built for {transports}.")
    launcher = launcher or usable[0]
    program = programs[launcher]
    if launcher not in transports or program is None:
        raise RuntimeError(
            f"`launcher` must be one that Horovod was built for and that is installed: {usable}. "
            f"Received: launcher={launcher!r}"
        )
    if launcher == "gloo":
        return [program, "--gloo", "-np", str(num_ranks), "-H", f"localhost:{num_ranks}"]
    return [program, *_mpirun_options(program), "-np", str(num_ranks)]


def _mpirun_options(program):
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    ).stdout
    if not any(word in said for word in ("Open MPI", "OpenRTE", "PRTE", "prterun")):
        return []  # others bind no ranks to cores and start for root, too
    # The first lets root start it; the second allows more ranks than cores. Ranks that are bound to
    # one core each could not use idle cores.
    return ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
