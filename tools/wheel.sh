#!/usr/bin/env bash
# Builds a wheel for $VENV's TensorFlow in dist/; auditwheel checks what it links to.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh
venv=${VENV:-.venv}
LOG=out/wheel.log
rm -f "$LOG"

# Wheels for several TensorFlows have the same name, so each has its own folder.
folder=dist/tensorflow-${TF:?is set by make}
rm -rf "$folder"
phase "Compiling the wheel for TensorFlow $TF" "$venv/bin/python" -m pip wheel --verbose --no-deps \
  --no-build-isolation --wheel-dir "$folder" .
wheel=$(ls "$folder"/*.whl)
echo "$wheel"
"$venv/bin/auditwheel" show "$wheel"
