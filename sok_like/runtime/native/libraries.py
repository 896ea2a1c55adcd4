"""Finds and loads the shared libraries, at first use and never at import of the package.

`ops()` is the TensorFlow op library, `mpi_ops()` that of exchanges by MPI, `core()` the NumPy
module. Before loading, the build text in the file (`cpp/build_info.cc`) is compared with the
running TensorFlow and processor: the wrong library would fail with a missing symbol or an illegal
instruction.
"""

import ctypes
import functools
import importlib
import mmap
import pathlib
import platform
import re
import sys
import sysconfig
import threading
from types import ModuleType

_REMEDY = "Rebuild it with `make venv`, or with `pip install .`"
_BUILD_INFO = re.compile(rb"sok_build_info\{tensorflow=([^;}]*);cpu=([^}]*)\}")

_folder = pathlib.Path(__file__).resolve().parents[2]
_ops_file: pathlib.Path | None = None  # tests replace `_ops.so` by another library
_loaded: dict[str, ModuleType] = {}
# Re-entrant: importing TensorFlow under the lock may run code that asks for a library.
_lock = threading.RLock()


def ops() -> ModuleType:
    """The TensorFlow op library's Python module, loaded at the first call."""
    return _load_once("_ops", lambda: _load_ops(ops_path()))


def ops_path(name: str = "_ops") -> pathlib.Path:
    """The path of the library that `ops()` or `mpi_ops()` ("_mpi") loads. Imports TensorFlow."""
    if name == "_ops" and _ops_file:
        return _ops_file
    # A clone may hold libraries for other TensorFlows beside `_ops.so`, as `_ops.2.21.0.so`.
    of_this_version = _folder / f"{name}.{_tensorflow_version()}.so"
    return of_this_version if of_this_version.exists() else _folder / f"{name}.so"


@functools.cache
def functions() -> ctypes.CDLL:
    """The functions of the op library that are not ops; loads it at the first call."""
    ops()
    return ctypes.CDLL(str(ops_path()))


def mpi_ops() -> ModuleType:
    """The ops that exchange by MPI, as `ops()`."""
    return _load_once("_mpi", lambda: _load_ops(ops_path("_mpi")))


def _tensorflow_version():
    import tensorflow as tf

    return _as_version(tf.version.VERSION)


def _as_version(text):
    """A version as pip writes it: "2.18.0-rc1" is "2.18.0rc1", and "2.23.0-dev1" "2.23.0.dev1"."""
    text = re.sub(r"[-_.]?(a|b|rc)(?=\d)", r"\1", text)
    return re.sub(r"[-_.]?dev(?=\d)", ".dev", text)


def core() -> ModuleType:
    """`sok_like._core`, the tables on NumPy arrays, loaded at the first call."""

    def load():
        path = _folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
        _check_instructions(path, _read_build_info(path)[1])
        return importlib.import_module("sok_like._core")

    return _load_once("_core", load)


def _load_once(name, load):
    # Reading without the lock is safe: an entry is complete when stored, and never replaced.
    if name not in _loaded:
        with _lock:
            if name not in _loaded:
                _loaded[name] = load()
    return _loaded[name]


def _load_ops(path):
    import tensorflow as tf

    built_for, instructions = _read_build_info(path)
    running = _tensorflow_version()
    if built_for != running:
        raise ImportError(
            f"The op library must be built for the running TensorFlow, {running}. "
            f"Received: {path}, built for TensorFlow {built_for}. {_REMEDY}."
        )
    _check_instructions(path, instructions)
    try:
        return tf.load_op_library(str(path))
    except tf.errors.OpError as error:
        raise ImportError(f"{path} could not be loaded: {error.message}. {_REMEDY}.") from error


def _read_build_info(path):
    """Returns (TensorFlow version, instruction names) of the library file `path`."""
    if not path.exists():
        copies = [pathlib.Path(f, path.parent.name, path.name).resolve() for f in sys.path]
        other = next((copy for copy in copies if copy.exists() and copy != path), None)
        remedy = _REMEDY
        if other is not None:
            remedy = (
                f"Python found the package here before the installed one, {other.parent}, because "
                "it was started in this folder or told so by PYTHONPATH. Start it in another folder"
            )
        raise ImportError(f"A compiled library is required at {path}, but is missing. {remedy}.")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
        match = _BUILD_INFO.search(bytes_)
        if match is None:
            raise ImportError(f"{path} does not say what it was built for. {_REMEDY}.")
        return _as_version(match[1].decode()), match[2].decode().split()


def _check_instructions(path, required):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if required else []
    flags = next((line for line in lines if line.startswith("flags")), "").partition(":")[2]
    missing = sorted(set(required) - set(flags.split()))
    if missing:
        raise ImportError(
            f"{path} was compiled for a processor with {', '.join(missing)}, which this "
            f"{platform.machine()} processor lacks. Rebuild it here with "
            "`CMAKE_ARGS=-DSOK_MARCH=native pip install .`."
        )
