#!/usr/bin/env bash
# Runs the C++ tests of the core, then the Python tests: first those that touch Keras under
# tf_keras, then all of them under Keras 3. SLOW=1 (`make test-all`) adds the tests marked slow, and
# full grids of cases instead of pairs. Stops at the first run that fails, so the last line is
# always the summary of the run that decides.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/${VENV:-.venv}/bin:$PATH
build=${SOK_BUILD:-build}
. tools/phase.sh

if compgen -G 'cpp/tests/*_test.cc' >/dev/null; then
  # `make venv` does not compile them, because they take longer than the package.
  compile_tests() { cmake -S . -B "$build" -DSOK_WITH_TESTS=ON && cmake --build "$build"; }
  LOG=out/tests.log phase "Compiling the C++ tests" compile_tests
  ctest --test-dir "$build" --output-on-failure -j "$(nproc)"
  # Emulated devices with other random decisions (cpp/tests/README.md).
  for seed in $([ -z "${SLOW:-}" ] || seq 2 20); do
    mkdir -p out
    SOK_EMULATOR_SEED=$seed ctest --test-dir "$build" --output-on-failure -R '^cuda_' \
      -E 'emulator|probe' >out/seed.log || { cat out/seed.log && exit 1; }
    echo "C++ tests of the CUDA backend with SOK_EMULATOR_SEED=$seed: passed"
  done
fi

# In the order of tests/conftest.py: xdist would run files with a single long test last.
workers=(-n auto --dist loadfile --no-loadscope-reorder)

echo "Tests marked keras, under TF_USE_LEGACY_KERAS=1"
status=0
TF_USE_LEGACY_KERAS=1 python -m pytest -m keras "${workers[@]}" "$@" || status=$?
[ "$status" -eq 0 ] || [ "$status" -eq 5 ] || exit "$status"  # 5: no test is marked

echo "All tests, under Keras 3"
TF_USE_LEGACY_KERAS=0 python -m pytest "${workers[@]}" "$@"
