#!/usr/bin/env bash
# Compiles into build/ what needs no TensorFlow; tools/make_venv.sh does it while pip downloads that.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH

# CMake remembers the paths of the environment it was configured with.
if [ -f build/CMakeCache.txt ] && ! grep -qF "$PWD/.venv/bin/python" build/CMakeCache.txt; then
  rm -rf build
fi
cmake -S . -B build -G Ninja -DSOK_WITH_TF=OFF -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
  ${CMAKE_ARGS:-}
cmake --build build
