#!/usr/bin/env bash
# Builds the op library with sanitizers and runs tests/lookup/test_stress_ops.py with it:
# tools/sanitize_ops.sh FOLDER SANITIZERS [arguments of test_stress_ops.py]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
folder=$1
sanitizers=$2
shift 2

echo "Building the op library with $sanitizers in $folder"
# -O1, because optimizing takes most of the build's time.
cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Sanitized -DCMAKE_CXX_FLAGS_SANITIZED=-O1 \
  -DSOK_SANITIZE="$sanitizers" -DSOK_WITH_TF=ON -DSOK_WITH_PYTHON=OFF -DSOK_WITH_TESTS=OFF \
  -DPython_EXECUTABLE="$(command -v python)" >/dev/null
cmake --build "$folder" --target _ops -- --quiet

# TensorFlow and Python are not instrumented, so the sanitizer's library is loaded before theirs.
# The thread sanitizer recognizes them by that; cpp/tf/tsan_edges.h tells it what it cannot see.
compiler=${CXX:-g++}
case $sanitizers in
  *thread*)
    runtime=$("$compiler" -print-file-name=libtsan.so)
    # TensorFlow's pool also hands on work where it splits an op; the C++ tests cover that.
    export TF_NUM_INTRAOP_THREADS=1
    ;;
  *) runtime=$("$compiler" -print-file-name=libasan.so) ;;
esac
# Python frees nothing at exit. TensorFlow passes containers and blocks between its own code and the
# code of its headers, which is instrumented.
export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:alloc_dealloc_mismatch=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1
export TF_CPP_MIN_LOG_LEVEL=2
# The thread sanitizer needs certain ranges of addresses, so these must not be random.
setarch -R env LD_PRELOAD="$runtime $("$compiler" -print-file-name=libstdc++.so)" \
  python -m tests.lookup.test_stress_ops --ops "$folder/_ops.so" "$@"
