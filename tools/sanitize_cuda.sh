#!/usr/bin/env bash
# The tests marked gpu under compute-sanitizer, with memcheck and racecheck. Needs a device, the CUDA
# toolkit's compute-sanitizer, and the libraries of tools/build_cuda.sh --install. ARGS go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on PATH: it comes with the CUDA toolkit." >&2
  exit 1
fi
if [ "$(python -c 'from sok_like import _core; print(_core.cuda_device_count())')" = 0 ]; then
  echo "No CUDA device, or _core was built without CUDA: run tools/build_cuda.sh --install on a machine with one." >&2
  exit 1
fi
# racecheck looks at shared memory, of which only the sorts and scans have any; initcheck finds reads
# of memory that nobody wrote, such as a row that its key was given and nobody filled.
for tool in memcheck racecheck initcheck; do
  echo "compute-sanitizer --tool $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
    python -m pytest -q -m "gpu and not slow" tests/cuda "$@"
done
