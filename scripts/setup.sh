#!/usr/bin/env bash
# Make .venv: torch first, then the locked rest, then Archon itself. Run by `make setup`, again
# whenever requirements.lock or pyproject.toml changes.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Archon needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=python3.11")'
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }
# shellcheck disable=SC2086  # TORCH_ARGS holds several words
pip install ${TORCH_ARGS:-} torch==2.13.0 || {
    echo "torch could not be installed; see 'Choosing a torch build' in README.md" >&2; exit 1; }
pip install --require-hashes -r requirements.lock
pip install --no-deps --no-build-isolation -e .
.venv/bin/archon version
