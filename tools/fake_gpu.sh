#!/usr/bin/env bash
# Runs tests over TensorFlow's own GPU runtime on a machine without a GPU, with every table in device
# memory (tests/fake_gpu.py). Needs no nvcc. `tools/fake_gpu.sh ARGS...` gives pytest these in place
# of the selection below.
#
#   .venv-gpu        the wheel `tensorflow`, alone; all else comes from .venv
#   build-fake-gpu   the fake driver, and the op library with emulated kernels for the device "GPU"
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/phase.sh
wheel=.venv-gpu build=build-fake-gpu
export PATH=$PWD/${VENV:-.venv}/bin:$PATH

if [ ! -f $wheel/done ]; then
  phase "Installing TensorFlow with CUDA into $wheel (600 MB)" python -m pip install --no-deps \
    --upgrade --target $wheel "tensorflow==${TF:-2.21.0}"
  touch $wheel/done
fi
export PYTHONPATH=$PWD/$wheel:$PWD
compile() {
  cmake -S . -B $build -G Ninja -DSOK_UNITY=ON -DSOK_WITH_TESTS=ON -DSOK_WITH_PYTHON=OFF \
    -DPython_EXECUTABLE="$(command -v python)" ${CMAKE_ARGS:-} &&
    cmake --build $build --target _ops_fake_gpu
}
phase "Compiling the fake driver and the ops" compile

export SOK_TEST_OPS=fake_gpu SOK_BUILD=$build LD_LIBRARY_PATH=$PWD/$build/fake_gpu
export TF_FORCE_GPU_ALLOW_GROWTH=true
unset CUDA_VISIBLE_DEVICES
run() { python -m pytest -q -p no:cacheprovider -m "$1" -n "${WORKERS:-auto}" --dist loadfile "${@:2}"; }
if [ $# -gt 0 ]; then
  run "not ranks" "$@"
  exit
fi
all="tests/cuda/test_fake_gpu.py tests/table tests/lookup tests/group_embedding tests/embeddings
  tests/optimizers tests/saving tests/serving tests/sok2 tests/deeprec tests/feature_column
  tests/inspection tests/callbacks tests/test_training.py tests/test_session.py tests/test_fit.py"
echo "Tests marked keras, under TF_USE_LEGACY_KERAS=1"
TF_USE_LEGACY_KERAS=1 run "keras and not ranks" $all
echo "All tests, under Keras 3"
TF_USE_LEGACY_KERAS=0 run "not ranks" $all
