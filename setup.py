"""Compiles the shared libraries with CMake; everything else is in pyproject.toml."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# Older versions reject pyproject.toml's license with a message that does not mention setuptools.
if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(
        "setuptools 77 or newer is required to build sok_like. "
        f"Received: setuptools {setuptools.__version__}. "
        'Type: pip install "setuptools>=77,<80"'
    )

ROOT = pathlib.Path(__file__).resolve().parent


class FreshBuild(build):
    """Starts with empty folders: earlier builds may have left files that no longer exist.

    CMake also remembers the programs of pip's isolated environment, which pip has removed.
    """

    def run(self):
        for folder in (self.build_lib, self.build_temp):
            shutil.rmtree(folder, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Makes both extensions by one CMake build, without setuptools' code per extension."""

    def run(self):
        # An editable install keeps its objects in the clone, where later builds are incremental.
        if self.editable_mode:
            folder, prefix = ROOT / os.environ.get("SOK_BUILD", "build"), ROOT
        else:
            folder, prefix = map(os.path.abspath, (self.build_temp, self.build_lib))
        # pip's cmake and ninja lie beside the building Python, which may not be on PATH.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        if not self.editable_mode:
            configure += ["-DSOK_UNITY=ON"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        build = ["cmake", "--build", folder]
        install = ["cmake", "--install", folder, "--prefix", prefix]
        for command in (configure, build, install):
            subprocess.check_call([str(word) for word in command], env={**os.environ, "PATH": path})


setup(
    ext_modules=[Extension(f"sok_like.{name}", []) for name in ("_core", "_ops", "_mpi")],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
