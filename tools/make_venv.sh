#!/usr/bin/env bash
# Creates $VENV and installs the pinned requirements, including those of TensorFlow $TF. Meanwhile
# compiles into $SOK_BUILD what needs no TensorFlow.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh
rm -f "$LOG"

tools/check_compiler.sh
venv=${VENV:-.venv}
python=$venv/bin/python
pins=requirements/tensorflow/${TF:?is set by make}
if [ ! -f "$pins.txt" ]; then
  known=$(cd requirements/tensorflow && ls *.no_deps.txt)
  echo "TF must be one of" ${known//.no_deps.txt/}". Received: TF=$TF" >&2
  exit 1
fi
# If Python was upgraded or removed, its environment no longer starts.
if ! $python -c '' 2>/dev/null; then
  base=$(tools/find_python.sh)
  phase "Creating $venv with $base" "$base" -m venv --clear "$venv"
fi

pip() { $python -m pip --disable-pip-version-check "$@"; }
export PIP_PROGRESS_BAR=off  # a log has no use for it
phase "Installing the tools of the build" pip install -r requirements/build.txt
# Needs only these requirements. If it fails, the later build fails in the same way and reports it.
tools/compile_core.sh >/dev/null 2>&1 &
# One run of the resolver for all files, so that no file undoes another's pins. No isolation:
# packages that come as source are built with the pinned setuptools.
phase "Installing TensorFlow $TF and the other requirements, compiling the core (1 to 3 minutes)" \
  pip install --no-build-isolation -c requirements/constraints.txt \
  -r "$pins.txt" $(for name in horovod test examples; do echo "-r requirements/$name.txt"; done)
phase "Installing tf_keras and the data of the examples" \
  pip install --no-deps -r requirements/no_deps.txt -r "$pins.no_deps.txt"
phase "Compiling the rest of the core" wait
