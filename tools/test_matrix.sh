#!/usr/bin/env bash
# Runs a selection of the tests on every TensorFlow of requirements/tensorflow/, under Keras 3 and
# tf_keras, on 1 and 2 ranks; prints the Markdown table of docs/install.md. Fails if a test fails.
# VERSIONS="2.16.2 2.21.0" chooses some of the versions.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=${VERSIONS:-$(cd requirements/tensorflow && ls *.no_deps.txt | sed 's/.no_deps.txt//')}
one_rank="tests/lookup tests/optimizers tests/table tests/saving tests/embeddings tests/group_embedding tests/runtime
  tests/test_training.py tests/test_session.py tests/sok2/test_ranks.py"
two_ranks="tests/test_parity.py tests/test_fit.py"
export SOK_MOST_RANKS=2
marked=("" "keras and ")  # what does not depend on Keras is tested once
log=out/test_matrix.log
failed=0
mkdir -p out
: >"$log"

# cell LEGACY PYTEST_WORDS...: runs tests and prints "12 passed, 3 skipped", or what else happened.
cell() {
  local legacy=$1 code=0 begin=$SECONDS part
  shift
  part=$(mktemp)
  TF_USE_LEGACY_KERAS=$legacy "$venv/bin/python" -m pytest -q "$@" >"$part" 2>&1 || code=$?
  cat "$part" >>"$log"
  tail -n 1 "$part" | sed -E 's/^=+ //; s/ in [0-9.]+s.*//; s/, [0-9]+ (deselected|warnings?)//g'
  rm "$part"
  echo "$versions_of: $((SECONDS - begin)) s" >>"$log"
  return "$code"
}

table="| | Keras 3, 1 rank | tf_keras, 1 rank | Keras 3, 2 ranks | tf_keras, 2 ranks |
|---|---|---|---|---|"
for tf in $versions; do
  make venv horovod TF="$tf"
  venv=.venv-$tf
  [ -d "$venv" ] || venv=.venv  # the default one
  versions_of=$("$venv/bin/python" - <<'PYTHON'
import platform
from importlib.metadata import version
names = {"tensorflow-cpu": "TensorFlow", "keras": "Keras", "tf_keras": "tf_keras", "numpy": "NumPy"}
print(", ".join(f"{said} {version(name)}" for name, said in names.items()) + ",", end=" ")
print("Python", platform.python_version())
PYTHON
)
  row="| $versions_of |"
  for legacy in 0 1; do
    echo "Testing $versions_of, TF_USE_LEGACY_KERAS=$legacy, 1 rank"
    row+=" $(cell $legacy -m "${marked[legacy]}not ranks" -n auto --dist loadfile $one_rank) |" || failed=1
  done
  for legacy in 0 1; do
    echo "Testing $versions_of, TF_USE_LEGACY_KERAS=$legacy, 2 ranks"
    row+=" $(cell $legacy -m "${marked[legacy]}ranks" $two_ranks) |" || failed=1
  done
  table+=$'\n'$row
  echo "$row"
done
echo "$table" | tee out/test_matrix.md
[ "$failed" -eq 0 ] || echo "What failed is in $log" >&2
exit "$failed"
