#!/usr/bin/env bash
# Everything that wants a device, in the order in which it is worth doing, on a machine that need not
# have an environment of this project:
#
#   tools/check_gpu.sh              all steps
#   tools/check_gpu.sh build smoke  these only; `tools/check_gpu.sh list` names them
#
# Wants nvcc, CMake, and a Python with NumPy, pybind11, pytest, pytest-timeout and hypothesis, .venv's
# where there is one; TensorFlow is not needed: the tests of the ops, and with them the kernels of the
# exchange between ranks, run where one sees the device. PyTorch and CuPy are used where they are. PYTHON=...
# chooses another. A step is ended after LIMIT seconds (540), its output is in OUT/STEP.log (OUT:
# build-cuda/check), and the last lines sum up. Exit status 1 if a step failed; but for build and
# smoke, a failed step does not keep the next one from running.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD PYTHONUNBUFFERED=1
export SOK_TEST_GPU=required  # a test that finds no device fails
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export PYTHON
OUT=${OUT:-build-cuda/check}
LIMIT=${LIMIT:-540}
STEPS=(info build smoke test ops memcheck initcheck synccheck racecheck bench slow)

# What is here, and what is missing.
info() {
  nvidia-smi
  nvcc --version
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

# For this device only, which takes half the time.
build() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)
  ARCHITECTURES=${ARCHITECTURES:-${capability:+${capability/./}-real}}
  ARCHITECTURES=${ARCHITECTURES:-80-real;90} tools/build_cuda.sh --install &&
    "$PYTHON" -c 'from sok_like import _core; print(_core.cuda_device_info())'
}

# Its error says what is missing: the build, the device, or a driver as new as the toolkit.
require_device() { "$PYTHON" -c 'from sok_like import _core; _core.cuda_device_info()'; }

# The kernels of lookups and updates once, in seconds: a launch that fails at all shows here.
smoke() {
  require_device && "$PYTHON" -m benchmarks.gpu_table --quick
}

run_tests() {
  require_device && "$PYTHON" -m pytest -q -m "$@" --maxfail=20 -p no:cacheprovider
}
test_step() { run_tests "gpu and not slow" tests/cuda --ignore=tests/cuda/test_ops.py; }
ops() { run_tests gpu tests/cuda/test_ops.py; }  # skipped without a TensorFlow that sees the device
slow() { run_tests "gpu and slow" tests/cuda; }  # 100 million keys

# Without drawn cases, the benchmark, the tests of the core and TensorFlow, which take long under it.
sanitize() {
  local long="agrees_with_a_dict or test_benchmark or test_core or test_ops"
  TOOLS=$1 tools/sanitize_cuda.sh -x -k "not ($long)"
}
memcheck() { sanitize memcheck; }
initcheck() { sanitize initcheck; }
synccheck() { sanitize synccheck; }
racecheck() { sanitize racecheck; }

bench() {
  require_device && "$PYTHON" -m benchmarks.gpu_table --json "$OUT/gpu_table.json"
}

if [ "${1:-}" = list ]; then
  echo "${STEPS[*]}"
  exit 0
fi
if [ "${1:-}" = --step ]; then  # by this script itself, so that `timeout` has a process to end
  shift
  [ "$1" = test ] && set -- test_step
  "$1"
  exit
fi
mkdir -p "$OUT"
summary=()
status=0
for step in "${@:-${STEPS[@]}}"; do
  if [[ " ${STEPS[*]} " != *" $step "* ]]; then
    echo "Steps are: ${STEPS[*]}. Received: $step" >&2
    exit 2
  fi
  echo "== $step"
  begin=$SECONDS
  timeout --kill-after=10 "$LIMIT" "$0" --step "$step" 2>&1 | tee "$OUT/$step.log"
  code=${PIPESTATUS[0]}
  result="passed"
  [ "$code" = 124 ] && result="was ended after $LIMIT s"
  [ "$code" != 0 ] && [ "$code" != 124 ] && result="failed ($code)"
  [ "$code" != 0 ] && status=1
  summary+=("$(printf '%-10s %4d s  %s' "$step" $((SECONDS - begin)) "$result")")
  if [ "$code" != 0 ] && [[ $step =~ ^(build|smoke)$ ]]; then
    break  # nothing behind it can work
  fi
done
printf '%s\n' "== summary" "${summary[@]}"
exit "$status"
