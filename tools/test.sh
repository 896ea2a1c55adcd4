#!/usr/bin/env bash
# Runs the C++ tests of the core, then the Python tests: all of them under Keras 3, and beside them
# those that touch Keras under tf_keras. SLOW=1 (`make test-all`) adds the tests marked slow, and
# full grids of cases instead of pairs. The last line is the summary of the run that decides: that
# of tf_keras if it alone failed.
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
  # Emulated devices with other random decisions (docs/cuda.md).
  for seed in $([ -z "${SLOW:-}" ] || seq 2 20); do
    mkdir -p out
    SOK_EMULATOR_SEED=$seed ctest --test-dir "$build" --output-on-failure -R '^cuda_' \
      -E 'emulator|probe' >out/seed.log || { cat out/seed.log && exit 1; }
    echo "C++ tests of the CUDA backend with SOK_EMULATOR_SEED=$seed: passed"
  done
fi

not_slow="not slow"
[ -z "${SLOW:-}" ] || not_slow="slow or not slow"
# In the order of tests/conftest.py: xdist would run files with a single long test last.
workers=(-n auto --dist loadfile --no-loadscope-reorder)

# Ranks wait for each other a quarter of their time. The second run has a low priority, so it gets
# the cores in that time and hardly keeps the first one from them (tests/cores.py).
mkdir -p out
TF_USE_LEGACY_KERAS=1 nice -n 10 python -m pytest -m "keras and ($not_slow)" "${workers[@]}" "$@" \
  >out/tests_tf_keras.log 2>&1 &
tf_keras=$!
trap 'kill "$tf_keras" 2>/dev/null || true' EXIT

echo "All tests, under Keras 3; meanwhile those marked keras, under TF_USE_LEGACY_KERAS=1"
status=0
TF_USE_LEGACY_KERAS=0 python -m pytest -m "$not_slow" "${workers[@]}" "$@" |
  tee out/tests_keras_3.log || status=$?

legacy=0
wait "$tf_keras" || legacy=$?
echo "Tests marked keras, under TF_USE_LEGACY_KERAS=1"
cat out/tests_tf_keras.log
[ "$legacy" -ne 5 ] || legacy=0  # no test is marked
if [ "$legacy" -eq 0 ]; then
  echo "All tests, under Keras 3"
  tail -n 1 out/tests_keras_3.log
fi
exit $((status ? status : legacy))
