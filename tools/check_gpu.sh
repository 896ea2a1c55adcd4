#!/usr/bin/env bash
# Runs everything that needs a device, ordered by value, within 45 minutes. The machine need not
# have an environment of this project:
#
#   tools/check_gpu.sh              the steps that have not passed yet
#   tools/check_gpu.sh smoke test   these steps, whether they have passed or not
#   tools/check_gpu.sh list         names of the steps and their limits in seconds
#   tools/check_gpu.sh report       the table of the steps that have run
#   REHEARSE=1 tools/check_gpu.sh   the same without a device: by the emulator, without sanitizers,
#                                   and as if TensorFlow were not there, except for the step ops
#
# Needs nvcc, CMake, and a Python with NumPy, pybind11, pytest, pytest-timeout and hypothesis, by
# default .venv's if there is one; PYTHON=... chooses another. TensorFlow is optional: the tests of
# the ops run if it sees the device. The step `core` runs the kernels of the exchange between ranks
# without it. PyTorch and CuPy are used if they are installed.
#
# A step writes STEP.log and, when it is done, STEP.result to OUT (build-cuda/check). At its limit
# it is interrupted; pytest still reports what it has run. A step that has passed runs again only
# after a source has changed. The last lines are a table in Markdown, also in OUT/report.md. The
# exit status is 1 if a step failed. Later steps run nevertheless, except after build and smoke.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export PYTHON
REHEARSE=${REHEARSE:-}
OUT=${OUT:-build-cuda/check${REHEARSE:+-rehearsed}}
TOTAL=${TOTAL:-2700}
STEPS=(info build smoke test core bench memcheck ops racecheck initcheck synccheck slow)
declare -A LIMITS=([info]=30 [build]=420 [smoke]=120 [test]=540 [core]=120 [bench]=300
  [memcheck]=300 [ops]=240 [racecheck]=180 [initcheck]=180 [synccheck]=120 [slow]=150)
if [ -z "$REHEARSE" ]; then
  export SOK_TEST_GPU=required  # a test that finds no device fails
else
  export PYTHONPATH=$PWD/tools/without_tensorflow:$PWD
fi

# Prints what is installed, and what is missing.
info() {
  if [ -z "$REHEARSE" ]; then
    nvidia-smi
    nvcc --version
  fi
  cmake --version
  "$PYTHON" - <<'PY'
import importlib.metadata as metadata
import sys

print(sys.version)
needed = ["numpy", "pybind11", "pytest", "pytest-timeout", "hypothesis"]
missing = []
for name in [*needed, "torch", "cupy-cuda12x", "cupy-cuda13x"]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not there")
        missing += [name] if name in needed else []
sys.exit(f"Install first: {' '.join(missing)}" if missing else 0)
PY
}

# Compiles for this device only, which takes half the time.
build() {
  if [ -n "$REHEARSE" ]; then
    compgen -G "${SOK_BUILD:-build}/_cuda_emulated*.so" || { echo "The emulator comes with the C++ tests: make test" && false; }
    return
  fi
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)
  ARCHITECTURES=${ARCHITECTURES:-${capability:+${capability/./}-real}}
  ARCHITECTURES=${ARCHITECTURES:-80-real;90} CMAKE_ARGS="-DSOK_WITH_TESTS=ON ${CMAKE_ARGS:-}" \
    tools/build_cuda.sh --install &&
    "$PYTHON" -c 'from sok_like import _core; print(_core.cuda_device_info())'
}

# The error says what is missing: the build, the device, or a driver as new as the toolkit.
require_device() {
  [ -n "$REHEARSE" ] || "$PYTHON" -c 'from sok_like import _core; _core.cuda_device_info()'
}

# Runs the kernels of lookups and updates once, in seconds: launches that always fail show here.
smoke() {
  require_device && "$PYTHON" -m benchmarks.gpu_table --quick ${REHEARSE:+--emulated}
}

# `run_tests MARKS FILE...`: runs the device's tests, or the emulator's.
run_tests() {
  local marks=$1
  shift
  local which=(-m "gpu and $marks")
  [ -z "$REHEARSE" ] || which=(-m "not gpu and not slow" -k emulated)
  require_device && "$PYTHON" -m pytest -q "${which[@]}" "$@" --maxfail=20 -p no:cacheprovider
}
test_step() {
  run_tests "not slow" tests/core tests/cuda --ignore=tests/cuda/test_ops.py
}
core() {  # the backend's C++ tests: what Python reaches by TensorFlow alone, too
  local folder=build-cuda
  [ -z "$REHEARSE" ] || folder=${SOK_BUILD:-build}
  require_device && ctest --test-dir "$folder" --output-on-failure -R "^cuda_" -j 4
}
ops() {  # skipped without a TensorFlow that sees the device
  if [ -n "$REHEARSE" ]; then
    PYTHONPATH=$PWD SOK_TEST_OPS=emulated "$PYTHON" -m pytest -q -p no:cacheprovider tests/optimizers/test_rules.py
  else
    run_tests "not slow" tests/cuda/test_ops.py
  fi
}
slow() {  # 100 million keys; under the emulator, what the step runs at all
  SLOW=1 run_tests slow tests/cuda/test_table.py
}

# Without the benchmark, the long trainings and TensorFlow, which take long here.
sanitize() {
  local long="test_benchmark or test_optimizers or test_adam_replay or test_ops"
  if [ -n "$REHEARSE" ]; then  # the same choice of tests, each time with other chances
    SOK_EMULATOR_SEED=$((RANDOM + 1)) "$PYTHON" -m pytest -q -x -m "not gpu and not slow" \
      -k "emulated and test_group and not ($long)" tests/cuda -p no:cacheprovider
    return
  fi
  TOOLS=$1 tools/sanitize_cuda.sh -x -k "not ($long)"
}
memcheck() { sanitize memcheck; }
initcheck() { sanitize initcheck; }
synccheck() { sanitize synccheck; }
racecheck() { sanitize racecheck; }

bench() {
  require_device && "$PYTHON" -m benchmarks.gpu_table --json "$OUT/bench.json" \
    ${REHEARSE:+--quick --emulated}
}

# A hash of every source on which a step depends.
state() {
  find cpp sok_like benchmarks tests/cuda tests/core tests/*.py tools cmake CMakeLists.txt -type f \
    ! -name '*.so' ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16
}

report() { "$PYTHON" tools/gpu_report.py "$OUT" "${STEPS[@]}" | tee "$OUT/report.md"; }

if [ "${1:-}" = list ]; then
  for step in "${STEPS[@]}"; do echo "$step ${LIMITS[$step]}"; done
  exit 0
fi
if [ "${1:-}" = --step ]; then  # by this script itself, so that `timeout` has a process to end
  shift
  [ "$1" = test ] && set -- test_step
  "$1"
  exit
fi
mkdir -p "$OUT"
if [ "${1:-}" = report ]; then
  report
  exit
fi
for step in "$@"; do
  if [[ " ${STEPS[*]} " != *" $step "* ]]; then
    echo "Steps are: ${STEPS[*]}. Received: $step" >&2
    exit 2
  fi
done
status=0
now=$(state)
for step in "${@:-${STEPS[@]}}"; do
  if [ $# = 0 ] && [ "$(cat "$OUT/$step.result" 2>/dev/null)" = "passed $now" ]; then
    echo "== $step has passed"
    continue
  fi
  limit=$((TOTAL - SECONDS < LIMITS[$step] ? TOTAL - SECONDS : LIMITS[$step]))
  if [ "$limit" -lt 20 ]; then
    echo "== $step: the time is up"
    status=1
    continue
  fi
  echo "== $step"
  rm -f "$OUT/$step.result"
  begin=$SECONDS
  timeout --signal=INT --kill-after=15 "$limit" "$0" --step "$step" 2>&1 | tee "$OUT/$step.log"
  code=${PIPESTATUS[0]}
  echo $((SECONDS - begin)) >"$OUT/$step.seconds"
  result=passed
  [ "$code" = 0 ] || { result="failed ($code)" && status=1; }
  [ "$code" != 124 ] || result="ended after $limit s"
  echo "$result $now" >"$OUT/$step.result"
  if [ "$code" != 0 ] && [[ $step =~ ^(build|smoke)$ ]]; then
    break  # nothing behind it can work
  fi
done
report
exit "$status"
