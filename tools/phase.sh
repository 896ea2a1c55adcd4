# To be sourced by other scripts. `phase NAME COMMAND...` prints one line: the name and its seconds.
# The command's output goes to $LOG, which is named if the command fails.
LOG=${LOG:-out/setup.log}

phase() {
  local name=$1 begin=$SECONDS code=0
  shift
  mkdir -p "$(dirname "$LOG")"
  printf '%s ...' "$name"
  "$@" >>"$LOG" 2>&1 || code=$?
  if [ "$code" -ne 0 ]; then
    printf ' failed after %d s\n' $((SECONDS - begin))
    tail -n 30 "$LOG" >&2
    echo "$name: failed with status $code; the whole log is $LOG" >&2
    return "$code"
  fi
  printf ' %d s\n' $((SECONDS - begin))
}
