#!/usr/bin/env bash
# Make or update .venv: torch first, then the rest of requirements.lock, then octavo itself, editable.
#
# torch goes first and alone because it is by far the largest part, and because everything else is pinned to fit it.
# `make venv` calls this only when the lock, pyproject.toml or this script has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"

stop() {
    echo "make venv: $1" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    stop "there is no '$python' here; install Python 3.11 or newer, or name one: make venv PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "'$python' is $("$python" --version 2>&1); octavo needs 3.11 or newer: make venv PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "'$python' has no venv module with pip; on Debian and Ubuntu: apt-get install python3-venv"

# A person at a terminal sees pip's progress bars; a log gets only what went wrong.
verbosity=(-qq)
if [ -t 1 ]; then verbosity=(); fi
pip_install() {
    .venv/bin/python -m pip --disable-pip-version-check install "${verbosity[@]}" "$@"
}

torch_pin=$(grep -x 'torch==[0-9.]*' requirements.lock)

echo "venv: .venv from $("$python" --version 2>&1)"
"$python" -m venv .venv
echo "venv: $torch_pin"
pip_install "$torch_pin"
echo "venv: $(grep -c '==' requirements.lock) packages of requirements.lock"
pip_install -r requirements.lock
echo "venv: octavo, whose kernels are compiled"
# The lock holds every dependency and the build tools, so nothing is resolved or downloaded here.
PATH="$PWD/.venv/bin:$PATH" pip_install --no-deps --no-build-isolation --editable .
.venv/bin/python - <<'PY'
from octavo.kernels import cpu

if cpu.why_absent():
    print(f"venv: there are no native kernels ({cpu.why_absent()}); casts take several times as long without them.")
    print("venv: install a C++ compiler and Python's headers, then: make clean venv")
PY
