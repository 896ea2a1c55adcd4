#!/usr/bin/env bash
# Builds everything with the CUDA backend in build-cuda/, where nvcc is.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH

if ! compgen -G 'cpp/core/cuda/*.cu' >/dev/null; then
  echo "There are no CUDA sources yet, so there is nothing to build."
  exit 0
fi
if ! command -v nvcc >/dev/null; then
  echo "The CUDA backend needs nvcc: install the CUDA toolkit 12 or newer and put its bin folder on PATH." >&2
  exit 1
fi
echo "Building with CUDA in build-cuda"
cmake -S . -B build-cuda -G Ninja -DSOK_WITH_CUDA=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" >/dev/null
cmake --build build-cuda -- --quiet
