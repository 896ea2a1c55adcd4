#!/usr/bin/env bash
# Installs the package into .venv so that edits of Python files count at once, and compiles the C++.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "Installing sok_like into .venv (compiles the C++: 1 to 2 minutes)"
# CMake remembers the paths of the environment it was configured with.
if [ -f build/CMakeCache.txt ] && ! grep -qF "$PWD/.venv/bin/python" build/CMakeCache.txt; then
  rm -rf build
fi
CMAKE_ARGS="-DSOK_WITH_TESTS=ON ${CMAKE_ARGS:-}" .venv/bin/python -m pip \
  --disable-pip-version-check install --quiet --no-build-isolation --no-deps --editable .
