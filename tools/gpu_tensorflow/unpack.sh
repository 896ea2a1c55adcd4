#!/usr/bin/env bash
# Unpacks the parts of pack.py and makes `import tensorflow` work there: unpack.sh PARTS DEST, then
# `source DEST/env.sh`. PARTS has all parts and SHA256SUMS.
#
# TensorFlow opens libraries of CUDA 12 by name. Its runtime has come along. cuBLAS and the others
# are the newest that this machine has, under the names that TensorFlow wants; EMPTY=1 puts empty
# libraries there, with which all but matrix products and convolutions works.
set -euo pipefail
parts=$1
mkdir -p "$2/site" "$2/cuda"
dest=$(cd "$2" && pwd)
python=${PYTHON:-python3}
(cd "$parts" && sha256sum --check --quiet SHA256SUMS)
if command -v xz >/dev/null; then
  cat "$parts"/part-* | xz --decompress --threads=0 | tar -x -C "$dest/site"
else
  cat "$parts"/part-* | "$python" -c "
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('$dest/site', filter='fully_trusted')"
fi

path=$dest/cuda
ln -sf "$dest"/site/nvidia/cuda_runtime/lib/libcudart.so.12 "$path/"
search="/usr/local /usr/lib /usr/lib64 $("$python" -c 'import sys; print(*filter(None, sys.path))')"
newest() { find -L $search -name "$1" 2>/dev/null | grep -E '\.so\.[0-9]+$' | sort -V | tail -n 1 || true; }
# TensorFlow lists no GPU without NVML; one function of it is enough.
if ! "$python" -c 'import ctypes; ctypes.CDLL("libnvidia-ml.so.1")' 2>/dev/null; then
  echo 'int nvmlInit_v2(void) { return 0; }' | gcc -shared -fPIC -x c - -o "$path/libnvidia-ml.so.1"
fi
for name in libcublas.so.12 libcublasLt.so.12 libcufft.so.11 libcusolver.so.11 libcusparse.so.12 libcudnn.so.9; do
  there=
  [ -n "${EMPTY:-}" ] || there=$(newest "${name%%.so*}.so.*")
  if [ -n "$there" ]; then
    ln -sf "$there" "$dest/cuda/$name"
    path=$path:$(dirname "$there")
  else
    gcc -shared -x c /dev/null -Wl,-soname,"$name" -o "$dest/cuda/$name"
  fi
  echo "$name: ${there:-an empty library}"
done
cat >"$dest/env.sh" <<ENV
export PYTHONPATH=$dest/site\${PYTHONPATH:+:\$PYTHONPATH}
export LD_LIBRARY_PATH=$path\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export TF_FORCE_GPU_ALLOW_GROWTH=true  # leaves memory to the tables
export XLA_FLAGS=--xla_gpu_cuda_data_dir=/usr/local/cuda
ENV
echo "source $dest/env.sh"
