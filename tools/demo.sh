#!/usr/bin/env bash
# Trains examples/flights.py on several ranks: tools/demo.sh NUM_RANKS [ARGS]. TensorFlow's messages
# go to a file, which is named if the program fails.
set -euo pipefail
cd "$(dirname "$0")/.."
log=out/demo.log
mkdir -p out

echo "Training examples/flights.py on $1 rank(s)"
code=0
${VENV:-.venv}/bin/python -m sok_like.run -np "$1" examples/flights.py "${@:2}" 2>"$log" || code=$?
if [ "$code" -ne 0 ]; then
  tail -n 30 "$log" >&2
  echo "examples/flights.py failed with status $code; what it said is in $log" >&2
  exit "$code"
fi
echo "The demo took $SECONDS s"
