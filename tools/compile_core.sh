#!/usr/bin/env bash
# Compiles into $SOK_BUILD what needs no TensorFlow. tools/make_venv.sh calls it while pip runs.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/${VENV:-.venv} build=${SOK_BUILD:-build}
export PATH=$venv/bin:$PATH

# CMake remembers the paths of the environment it was configured with.
if [ -f "$build/CMakeCache.txt" ] && ! grep -qF "$venv/bin/python" "$build/CMakeCache.txt"; then
  rm -rf "$build"
fi
cmake -S . -B "$build" -G Ninja -DSOK_WITH_TF=OFF -DSOK_UNITY=ON \
  -DPython_EXECUTABLE="$venv/bin/python" ${CMAKE_ARGS:-}
cmake --build "$build"
