#!/usr/bin/env bash
# Installs the package into $VENV in editable mode, and compiles the C++.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh
venv=${VENV:-.venv}

phase "Compiling the core" tools/compile_core.sh
export CMAKE_ARGS="-DSOK_WITH_TF=ON -DSOK_UNITY=ON -DSOK_OPS_SUFFIX=${OPS_SUFFIX:-} ${CMAKE_ARGS:-}"
phase "Compiling the TensorFlow ops, installing sok_like into $venv" "$venv/bin/python" -m pip \
  --disable-pip-version-check install --verbose --no-build-isolation --no-deps --editable .
