#!/usr/bin/env bash
# Runs a Python program on several ranks of this host: tools/run_ranks.sh NUM_RANKS PROGRAM...
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
num_ranks=$1
shift

# As root mpirun refuses to start without the first option, with more ranks than cores without the
# second. Bound to a core each, ranks could not use the cores that are idle.
exec mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$num_ranks" python "$@"
