#!/usr/bin/env bash
# Compiles what has changed since the last build, and puts the two libraries into sok_like/.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/${VENV:-.venv}/bin:$PATH
build=${SOK_BUILD:-build}

# A build folder that was removed is made anew.
[[ -f $build/build.ninja ]] || exec tools/install_package.sh
# Prints nothing if there is nothing to do, and everything if something fails.
cmake --build "$build" -- --quiet
cmake --install "$build" --prefix . >/dev/null
