#!/usr/bin/env bash
# Write requirements.lock anew: install what pyproject.toml asks for into an empty environment and freeze it.
#
#   scripts/lock.sh            with python3
#   PYTHON=python3.11 scripts/lock.sh
#
# torch is pinned here by hand and installed first, so that everything else is resolved against it. Its build (+cpu, +cu128)
# and the CUDA wheels that come with one are the machine's business: they have no hash in the lock, where torch stands in a
# comment that scripts/venv.sh reads. Of everything else the lock has the SHA-256 of each file that pip takes on Linux, on
# x86_64 and aarch64, with Python 3.11 to 3.13 (scripts/lock_hashes.py).
set -euo pipefail
cd "$(dirname "$0")/.."

torch_pin="torch==2.13.0"
python="${PYTHON:-python3}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet "$torch_pin"

# The requirements, not the project: locking must not need a project that builds.
"$scratch/venv/bin/python" - >"$scratch/wanted" <<'PY'
import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["report"], *extras["gguf"], *extras["study"], *extras["export"], *extras["serve"], *extras["docs"], *extras["dev"]]:
    if not requirement.startswith("octavo["):
        print(requirement)
PY
"${pip[@]}" install --quiet -r "$scratch/wanted" "$torch_pin"

"${pip[@]}" freeze --all --exclude pip | sed -E 's/\+[A-Za-z0-9.]+$//' | grep -vE '^(nvidia-|cuda-)' >"$scratch/pins"
grep -qx "$torch_pin" "$scratch/pins" || { echo "lock: torch was resolved to another version than $torch_pin" >&2; exit 1; }
grep -q ' @ ' "$scratch/pins" && { echo "lock: a requirement has a path instead of a version" >&2; exit 1; }
{
    echo "# Exact versions and hashes for CI, the Makefile and the README. Written by scripts/lock.sh; do not edit."
    echo "# $torch_pin"
    grep -vx "$torch_pin" "$scratch/pins" | "$scratch/venv/bin/python" scripts/lock_hashes.py
} >"$scratch/lock"
mv "$scratch/lock" requirements.lock
echo "requirements.lock: $(grep -c '^[^#].*==' requirements.lock) packages"
