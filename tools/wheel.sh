#!/usr/bin/env bash
# Puts a wheel of $VENV's TensorFlow into dist/, and lets auditwheel check what it links to.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh
venv=${VENV:-.venv}
LOG=out/wheel.log
rm -f "$LOG"

# Wheels of several TensorFlows have one name, so each has a folder.
folder=dist/tensorflow-${TF:?is set by make}
rm -rf "$folder"
phase "Compiling the wheel for TensorFlow $TF" "$venv/bin/python" -m pip wheel --verbose --no-deps \
  --no-build-isolation --wheel-dir "$folder" .
wheel=$(ls "$folder"/*.whl)
echo "$wheel"
"$venv/bin/auditwheel" show "$wheel"
