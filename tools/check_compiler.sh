#!/usr/bin/env bash
# Compiles a line of C++17, or says what to install.
set -euo pipefail

compiler=${CXX:-c++}
object=$(mktemp)
trap 'rm -f "$object"' EXIT
program='#include <optional>
std::optional<int> f() { if constexpr (sizeof(int) > 1) return 1; return {}; }'
if ! echo "$program" | "$compiler" -std=c++17 -x c++ -c -o "$object" - 2>/dev/null; then
  echo "A C++17 compiler is required, and '$compiler' is not one: install g++ 9 or newer (Debian and Ubuntu: the package g++), or name one with CXX=." >&2
  exit 1
fi
