#!/usr/bin/env bash
# Write requirements.lock anew from pyproject.toml: exact versions and hashes of everything but
# torch, which is installed first and without hashes because its builds differ by machine.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python - <<'PY' | .venv/bin/uv pip compile - --generate-hashes --universal --python-version 3.11 --no-header --no-annotate -q -o requirements.lock
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print("\n".join(d for d in wanted if not d.startswith("torch==")))
PY
echo "requirements.lock: $(grep -c '==' requirements.lock) packages"
