#!/usr/bin/env bash
# Runs what only a device can show of TensorFlow's ops, the most important first, each step within a
# limit: `run.sh OUT [STEP...]`, from the checkout's root, after `source DEST/env.sh` (unpack.sh).
# Each step writes OUT/STEP.log, and all together OUT/results.md. PROBE_DEVICE=/CPU:0 rehearses it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
export OUT PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
shift
python=${PYTHON:-python3}
TOTAL=${TOTAL:-460}  # seconds, of all steps together

probe() { "$python" "$here/probe.py" "$1"; }
suite() {
  "$python" -m pytest -q -p no:cacheprovider --maxfail=15 -m "not ranks" \
    -k "not dies_with_its_variable" "$@"
}
devices() { TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=dso_loader=1,gpu_device=1 probe devices; }
library() { probe library; }
equal() { probe equal; }
fit() { probe fit; }
fit_legacy() { TF_USE_LEGACY_KERAS=1 probe fit; }
kernels() {  # as KERNELS in tests/cuda/test_ops.py
  suite tests/table/test_variable.py tests/table/test_policies.py tests/optimizers/test_wrapper.py \
    tests/group_embedding/test_lookup_sparse.py tests/optimizers/test_nonfinite.py \
    tests/embeddings/test_all2all_dense_embedding.py
}
steps() { probe steps; }
profile() { probe profile; }
training() { suite tests/test_training.py tests/embeddings; }
session() { suite tests/test_session.py tests/saving/test_saver.py; }

if [ "${1:-}" = --step ]; then
  "$2"
  exit
fi
[ $# -gt 0 ] || set -- devices library equal kernels fit fit_legacy steps profile training session
table="| step | result | seconds |
|---|---|---|"
for step; do
  begin=$SECONDS code=0
  if [ $((TOTAL - SECONDS)) -lt 15 ]; then
    table+=$'\n'"| $step | no time left | |"
    continue
  fi
  limit=$((TOTAL - SECONDS < 150 ? TOTAL - SECONDS : 150))
  echo "== $step"
  timeout --signal=INT --kill-after=10 "$limit" "$0" "$OUT" --step "$step" >"$OUT/$step.log" 2>&1 ||
    code=$?
  tail -n 20 "$OUT/$step.log"
  table+=$'\n'"| $step | $([ $code = 0 ] && echo passed || echo "failed ($code)") | $((SECONDS - begin)) |"
  [ $code = 0 ] || [ "$step" != devices ] || break  # nothing behind it can work
done
echo "$table" | tee "$OUT/results.md"
