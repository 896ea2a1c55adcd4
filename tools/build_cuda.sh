#!/usr/bin/env bash
# Builds the core, `_core` and, if .venv has TensorFlow, the op library with the CUDA backend in
# build-cuda/. Needs nvcc. Changes nothing that is installed; `tools/build_cuda.sh --install` puts
# the libraries into sok_like/.
# WITH_TF=OFF omits the op library.
# REPORT=1 prints registers, stack and spills of each kernel, and how many loads of rows are under
# way at once. It fails if a kernel spills, or loads fewer rows ahead than its source asks for.
# PYTHON=... is the Python to build for, by default .venv's if there is one.
# ARCHITECTURES=90-real compiles for one kind of device only.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
PYTHON=${PYTHON:-$(command -v python || command -v python3)}

# The core and `_core` need no TensorFlow.
with_tf=${WITH_TF:-ON}
if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("tensorflow") is None)'; then
  with_tf=OFF
fi
echo "Building with CUDA in build-cuda (op library: $with_tf)"
generator=()
if command -v ninja >/dev/null; then
  generator=(-G Ninja)
fi
cmake -S . -B build-cuda "${generator[@]}" -DSOK_WITH_CUDA=ON -DSOK_WITH_TF=$with_tf -DSOK_UNITY=ON \
  -DSOK_CUDA_REPORT="${REPORT:-OFF}" -DSOK_CUDA_ARCHITECTURES="${ARCHITECTURES:-80-real;90}" \
  -DPython_EXECUTABLE="$PYTHON" ${CMAKE_ARGS:-} >/dev/null
if [ -n "${REPORT:-}" ]; then
  touch cpp/core/cuda/*/*.cu
  # Ninja prints nvcc's output when a file is done.
  cmake --build build-cuda --target sok_cuda | tools/kernel_report.py
  objects=build-cuda/CMakeFiles/sok_cuda.dir/cpp/core/cuda
  tools/loads_under_way.py $objects/rows/row_kernels.cu.o $objects/lookup/combine{,_gradient}.cu.o
fi
cmake --build build-cuda --parallel "$(nproc)" -- --quiet
# TensorFlow's library exports most names of CUDA's runtime, of another version.
if [ "$with_tf" = ON ] && nm -D --undefined-only build-cuda/_ops*.so | grep -i cuda; then
  echo "The op library must have a CUDA runtime of its own. It lacks the names above." >&2
  exit 1
fi
if [ "${1:-}" = --install ]; then
  cmake --install build-cuda --prefix . >/dev/null
fi
