#!/usr/bin/env bash
# Checks format and lint of Python and C++, and the types of the package. Changes no file.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/${VENV:-.venv}/bin:$PATH

ruff check --quiet .
ruff format --check --quiet . || { echo "Run 'ruff format .'" >&2; exit 1; }
mypy
find cpp -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' |
  xargs clang-format --dry-run -Werror
