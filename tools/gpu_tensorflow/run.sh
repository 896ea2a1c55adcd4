#!/usr/bin/env bash
# Runs what only a device can show of TensorFlow's ops, the most important first, each step within a
# limit: `run.sh OUT [STEP...]`, from the checkout's root, after `source DEST/env.sh` (unpack.sh).
# Steps that are joined by + run side by side. Each writes OUT/STEP.log, and all together
# OUT/results.md. PROBE_DEVICE=/CPU:0 rehearses it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
export OUT PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRACE=$OUT/libtrace.so
shift
python=${PYTHON:-python3}
TOTAL=${TOTAL:-460}  # seconds, of all steps together

probe() { "$python" "$here/probe.py" "$1"; }
devices() { TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=dso_loader=1,gpu_device=1 probe devices; }
library() { probe library; }
equal() { probe equal; }
fit() { probe fit; }
fit_legacy() { TF_USE_LEGACY_KERAS=1 probe fit; }
steps() { probe steps; }
profile() {
  local cuda
  cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  [ -f "$cuda/include/cupti.h" ] || cuda=/usr/local/cuda
  g++ -std=c++17 -O1 -shared -fPIC "$here/trace.cc" -o "$TRACE" -lcupti \
    -I"$cuda"/{include,extras/CUPTI/include} -L"$cuda"/{lib,lib64,extras/CUPTI/lib64} \
    -Wl,-rpath,"$cuda/lib:$cuda/lib64:$cuda/extras/CUPTI/lib64" || return
  probe profile
}
tests() {  # tables on the device, and what they are compared with on the CPU: tests/fake_gpu.py
  SOK_TEST_OPS=gpu "$python" -m pytest -q -p no:cacheprovider --maxfail=200 -m "not ranks" \
    -n "${WORKERS:-12}" --dist worksteal ${TESTS:-tests/table tests/lookup tests/group_embedding \
      tests/embeddings tests/optimizers tests/saving tests/serving tests/sok2 tests/deeprec \
      tests/feature_column tests/inspection tests/callbacks tests/test_training.py \
      tests/test_session.py tests/test_fit.py}
}
core() {
  "$python" -m pytest -q -p no:cacheprovider --maxfail=20 -m "gpu and not slow" -n 4 tests/core \
    tests/cuda --ignore=tests/cuda/test_ops.py
}

if [ "${1:-}" = --step ]; then
  "$2"
  exit
fi
# Results of one step, a line of the table.
limited() {
  local begin=$SECONDS limit=$((TOTAL - SECONDS < 280 ? TOTAL - SECONDS : 280)) result=passed
  if [ $limit -lt 15 ]; then
    echo "| $1 | no time left | |" >"$OUT/$1.result"
    return
  fi
  timeout --signal=INT --kill-after=10 $limit "$here/run.sh" "$OUT" --step "$1" >"$OUT/$1.log" 2>&1 ||
    result="failed ($?)"
  echo "| $1 | $result | $((SECONDS - begin)) |" >"$OUT/$1.result"
}
[ $# -gt 0 ] || set -- devices library+equal+fit+fit_legacy steps profile tests+core
results="| step | result | seconds |
|---|---|---|"
for group; do
  names=(${group//+/ })
  for name in "${names[@]}"; do limited "$name" & done
  wait
  for name in "${names[@]}"; do
    echo "== $name"
    tail -n 25 "$OUT/$name.log" 2>/dev/null
    results+=$'\n'$(cat "$OUT/$name.result")
  done
  ! grep -q "devices | failed" <<<"$results" || break  # nothing behind it can work
done
echo "$results" | tee "$OUT/results.md"
