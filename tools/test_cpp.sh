#!/usr/bin/env bash
# Builds the core's C++ tests with sanitizers and runs them: tools/test_cpp.sh FOLDER SANITIZERS
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
folder=$1
sanitizers=$2

if ! compgen -G 'cpp/tests/*_test.cc' >/dev/null; then
  echo "There are no C++ tests yet, so nothing was run under $sanitizers."
  exit 0
fi
echo "Building the C++ tests with $sanitizers in $folder"
cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSOK_SANITIZE="$sanitizers" \
  -DSOK_WITH_TF=OFF -DSOK_WITH_PYTHON=OFF -DSOK_WITH_TESTS=ON >/dev/null
cmake --build "$folder" -- --quiet
# The first finding ends its test, so that ctest counts the test as failed.
# One test asks for more memory than there is.
export ASAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
# The longest tests take minutes, so tests run in parallel.
ctest --test-dir "$folder" --output-on-failure --parallel "$(nproc)"
