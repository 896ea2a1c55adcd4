#!/usr/bin/env bash
# `docs.sh venv` creates .venv-docs from requirements/docs.txt; `docs.sh` builds the site into out/site;
# `docs.sh check` opens it in a browser, and installs what drives one before.
set -euo pipefail
cd "$(dirname "$0")/.."
LOG=out/docs.log
. tools/phase.sh
venv=.venv-docs
rm -f "$LOG"

if [ "${1:-}" = venv ]; then
  phase "Creating $venv" "$(tools/find_python.sh)" -m venv --clear "$venv"
  phase "Installing MkDocs" "$venv/bin/python" -m pip --disable-pip-version-check \
    install -r requirements/docs.txt
  exit
fi
if [ "${1:-}" = check ]; then
  phase "Installing Playwright" "$venv/bin/python" -m pip --disable-pip-version-check \
    install -r requirements/docs_check.txt
  exec "$venv/bin/python" tools/check_site.py
fi
export NO_MKDOCS_2_WARNING=1  # an advertisement in the log of every build
phase "Building the site" "$venv/bin/mkdocs" build --strict
echo "The site is out/site/index.html. To search it: python -m http.server -d out/site"
