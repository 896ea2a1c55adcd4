"""Prints `version;include folder;framework library` of the TensorFlow to compile against.

It is the one of the building Python. An isolated build of pip does not see the packages of the
environment that pip installs into; where the build has no TensorFlow of its own, it is the one of
that environment. TensorFlow itself says its version and folders, whatever the name of its
distribution (tensorflow-cpu, tf-nightly, a vendor's).
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

# How pip hides an environment's packages from a build.
_ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")
_ASK = """
import tensorflow as tf
print(tf.version.VERSION, tf.sysconfig.get_include(), tf.sysconfig.get_lib(), sep=";")
"""


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
    # In a process of its own, as importing may print.
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The TensorFlow of {sys.executable} does not load: {done.stderr[-2000:]}")
    version, include, folder = done.stdout.strip().splitlines()[-1].split(";")
    library = pathlib.Path(folder, "libtensorflow_framework.so.2")
    if not library.exists():
        raise SystemExit(f"{folder} is not a complete TensorFlow: no {library.name}")
    return f"{version};{include};{library}"


if __name__ == "__main__":
    print(config_line())
