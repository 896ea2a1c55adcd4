#!/usr/bin/env bash
# Installs the package into .venv so that edits of Python files count at once, and compiles the C++.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh

phase "Compiling the core" tools/compile_core.sh
export CMAKE_ARGS="-DSOK_WITH_TF=ON ${CMAKE_ARGS:-}"
phase "Compiling the TensorFlow ops, installing sok_like into .venv" .venv/bin/python -m pip \
  --disable-pip-version-check install --verbose --no-build-isolation --no-deps --editable .
