#!/usr/bin/env bash
# Builds the package and Horovod for tf-nightly and keras-nightly, in an environment of its own, and
# runs a selection of the tests on 1 and 2 ranks. Prints the Markdown table of docs/install.md, and
# what fails; docs/upgrading.md says what to do about it.
set -euo pipefail
cd "$(dirname "$0")/.."
export LOG=${LOG:-out/next.log}
. tools/phase.sh
rm -f "$LOG"

venv=.venv-next
python=$venv/bin/python
one_rank="tests/runtime tests/lookup tests/optimizers tests/saving tests/test_training.py"
two_ranks="tests/test_parity.py tests/test_fit.py"
export SOK_MOST_RANKS=2
failed=0

pip() { $python -m pip --disable-pip-version-check "$@"; }
export PIP_PROGRESS_BAR=off
[ -x "$python" ] || phase "Creating $venv" "$(tools/find_python.sh)" -m venv "$venv"
phase "Installing the tools of the build" pip install -r requirements/build.txt
# keras-nightly and tf-nightly bring each other; the pins of the released versions do not apply.
phase "Installing tf-nightly and keras-nightly" \
  pip install --upgrade --pre tf-nightly keras-nightly -r requirements/test.txt h5py pandas
phase "Installing Horovod" env PATH="$PWD/$venv/bin:$PATH" \
  "$python" -W ignore -m sok_like.install_horovod
CMAKE_ARGS=-DSOK_UNITY=ON \
  phase "Installing sok_like" pip install --no-build-isolation --no-deps --editable .

versions=$("$python" - <<'PYTHON'
import os, platform
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy, tensorflow as tf
print(f"TensorFlow {tf.version.VERSION}, Keras {keras.__version__}, NumPy {numpy.__version__}, "
      f"Python {platform.python_version()}")
PYTHON
)
# row NAME COMMAND...: runs a command and adds a row with its last line.
row() {
  local name=$1 code=0 part
  shift
  part=$(mktemp)
  "$@" >"$part" 2>&1 || code=$?
  cat "$part" >>"$LOG"
  table+=$'\n'"| $name | $(tail -n 1 "$part" | sed -E 's/^=+ //; s/ in [0-9.]+s.*//; s/ =+$//') |"
  grep -aE "^(FAILED|ERROR)" "$part" || true
  rm "$part"
  [ "$code" -eq 0 ] || failed=1
}
tests() { "$python" -m pytest -q "$@"; }
table="| $versions | |
|---|---|"
row "self-test" "$python" -m sok_like
row "self-test, 2 ranks" "$python" -m sok_like.run -np 2 -m sok_like
row "Keras 3, 1 rank" tests -m "not slow and not ranks" -n auto --dist loadfile $one_rank
row "Keras 3, 2 ranks" tests -m "ranks and not slow" $two_ranks
echo "$table" | tee out/next.md
[ "$failed" -eq 0 ] || echo "What failed is in $LOG" >&2
exit "$failed"
