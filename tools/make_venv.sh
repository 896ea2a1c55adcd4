#!/usr/bin/env bash
# Creates .venv and installs the pinned requirements into it.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/check_compiler.sh
python=.venv/bin/python
# A Python that was upgraded or removed leaves an environment that no longer starts.
if ! $python -c '' 2>/dev/null; then
  base=$(tools/find_python.sh)
  echo "Creating .venv with $base"
  "$base" -m venv --clear .venv
fi

pip() { $python -m pip --disable-pip-version-check "$@"; }
[ -z "${CI:-}" ] || export PIP_PROGRESS_BAR=off
echo "Installing the pinned requirements into .venv (1 to 3 minutes)"
pip install --quiet -r requirements/build.txt
# One resolver run over all files, so that no file undoes what another pinned. No isolation: the
# packages that come as source are built with the pinned setuptools.
pip install --quiet --no-build-isolation -c requirements/constraints.txt \
  $(for name in base horovod test examples; do echo "-r requirements/$name.txt"; done)
pip install --quiet --no-deps -r requirements/no_deps.txt
