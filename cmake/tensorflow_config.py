"""Prints `version;include folder;framework library` of the TensorFlow to compile against.

It is the one of the building Python. An isolated build of pip does not see the packages of the
environment that pip installs into; where the build has no TensorFlow of its own, it is the one of
that environment. Reads the package's files instead of importing it: importing takes seconds and may
print.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

# How pip hides an environment's packages from a build.
_ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")


def config_line() -> str:
    """What this file prints.

    Raises:
        SystemExit: there is no TensorFlow, or an incomplete one.
    """
    if importlib.util.find_spec("tensorflow") is None and "PYTHONPATH" in os.environ:
        environment = {k: v for k, v in os.environ.items() if k not in _ISOLATION}
        command = [sys.executable, __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        return done.stdout.strip()
    return _of_this_python()


def _of_this_python():
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "TensorFlow is not installed in the building Python. "
            "Type: pip install tensorflow-cpu==2.21.0"
        )
    root = pathlib.Path(spec.submodule_search_locations[0])
    version = None
    for name in ("tensorflow-cpu", "tensorflow", "tensorflow-intel", "tensorflow-aarch64"):
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    library = root / "libtensorflow_framework.so.2"
    if version is None or not library.exists():
        raise SystemExit(f"{root} is not a complete TensorFlow: no metadata, or no {library.name}")
    return f"{version};{root / 'include'};{library}"


if __name__ == "__main__":
    print(config_line())
