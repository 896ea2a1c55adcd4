"""Prints `version;include folder;framework library;C++ ABI` of the installed TensorFlow.

Reads the package's files instead of importing it: importing takes seconds and may print.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("tensorflow")
if spec is None or not spec.submodule_search_locations:
    sys.exit("TensorFlow is not installed in the building Python; install tensorflow-cpu==2.18.1")
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
    sys.exit(f"{root} holds no complete TensorFlow (missing metadata or {library.name})")
# Wheels since 2.16 are built with the C++11 ABI.
print(f"{version};{root / 'include'};{library};1")
