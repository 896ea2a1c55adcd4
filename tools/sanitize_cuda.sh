#!/usr/bin/env bash
# Runs the tests marked gpu under compute-sanitizer: tools/sanitize_cuda.sh [ARGS for pytest]. Before
# them, if they have been built (-DSOK_WITH_TESTS=ON), C++ tests of what Python reaches by TensorFlow
# alone: messages between ranks, and keys of several ranks.
# TOOLS="memcheck racecheck" chooses some of its tools. Needs a device, compute-sanitizer of the
# CUDA toolkit, and the library of tools/build_cuda.sh --install. PYTHON=... as there.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
PYTHON=${PYTHON:-$(command -v python || command -v python3)}

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on PATH: it comes with the CUDA toolkit." >&2
  exit 1
fi
if [ "$("$PYTHON" -c 'from sok_like import _core; print(_core.cuda_device_count())')" = 0 ]; then
  echo "No CUDA device, or _core was built without CUDA: run tools/build_cuda.sh --install on a machine with one." >&2
  exit 1
fi
# racecheck checks shared memory, which only the sorts and scans use. initcheck finds reads of
# memory that was never written, such as a row that was assigned to a key but not filled. synccheck
# finds warps that wait for lanes that never arrive.
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  echo "compute-sanitizer --tool $tool"
  options=()
  if [ "$tool" = memcheck ]; then
    # Memory that one stream uses while it belongs to another.
    options=(--track-stream-ordered-races all)
  fi
  sanitizer=(compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 1)
  for name in segments merge_keys check; do
    test=build-cuda/cuda_${name}_test
    [ ! -x "$test" ] || "${sanitizer[@]}" "$test"
  done
  "${sanitizer[@]}" --target-processes all \
    "$PYTHON" -m pytest -q -m "gpu and not slow" tests/core tests/cuda "$@"
done
