#!/usr/bin/env bash
# Prints the first Python that can build this project, or says what to install.
set -euo pipefail

# TensorFlow has wheels for Python 3.13 since 2.20.
newest=12
case ${TF:-2.21.0} in 2.2[0-9].*) newest=13 ;; esac

probe='
import importlib.util, os, sys, sysconfig
if not (3, 10) <= sys.version_info[:2] <= (3, int(sys.argv[1])):
    sys.exit("version")
# Debian ships venv without ensurepip, which is what puts pip into an environment.
if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    sys.exit("venv")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    sys.exit("headers")
print(sys.executable)  # not the name it was found by, which may be a shim of a version manager
'
lacks_venv="" lacks_headers=""
names=$(seq -f 'python3.%g' -s ' ' "$newest" -1 10)
for python in ${PYTHON:-python3 $names}; do
  path=$(command -v "$python") || continue
  if reason=$("$path" -c "$probe" "$newest" 2>&1); then
    echo "$reason"
    exit 0
  fi
  case $reason in
    venv) lacks_venv=${lacks_venv:-$path} ;;
    headers) lacks_headers=${lacks_headers:-$path} ;;
  esac
done

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
if [ -n "$lacks_venv" ]; then
  echo "$lacks_venv cannot create environments: install its venv and ensurepip modules (Debian and Ubuntu: the package python$(version_of "$lacks_venv")-venv)." >&2
elif [ -n "$lacks_headers" ]; then
  echo "$lacks_headers has no C headers: install them (Debian and Ubuntu: the package python$(version_of "$lacks_headers")-dev)." >&2
else
  echo "Python 3.10 to 3.$newest is required for TensorFlow ${TF:-2.21.0} and none of '${PYTHON:-python3 $names}' is suitable: install it, or name it with 'make PYTHON=/path/to/python'." >&2
fi
exit 1
