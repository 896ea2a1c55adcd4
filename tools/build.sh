#!/usr/bin/env bash
# Compiles what changed since the last time and puts the two libraries into sok_like/.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/${VENV:-.venv}/bin:$PATH
build=${SOK_BUILD:-build}

# Quiet when there is nothing to do, complete when something fails.
cmake --build "$build" -- --quiet
cmake --install "$build" --prefix . >/dev/null
