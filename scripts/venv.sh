#!/usr/bin/env bash
# Make or update .venv: requirements.lock, then torch, then octavo itself, editable.
#
# A file whose SHA-256 is not in the lock is refused. torch and the CUDA wheels of its build come after it and have none:
# which build it is, is the machine's business (scripts/lock.sh). What else torch needs is there by then.
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

torch_pin=$(sed -nE 's/^# (torch==[0-9.]+)$/\1/p' requirements.lock)

echo "venv: .venv from $("$python" --version 2>&1)"
"$python" -m venv .venv
echo "venv: $(grep -c '^[^#].*==' requirements.lock) packages of requirements.lock"
pip_install --require-hashes --no-deps -r requirements.lock
echo "venv: $torch_pin"
pip_install "$torch_pin"
echo "venv: octavo, whose kernels are compiled"
# The lock holds every dependency and the build tools, so nothing is resolved or downloaded here.
PATH="$PWD/.venv/bin:$PATH" pip_install --no-deps --no-build-isolation --editable .
.venv/bin/python - <<'PY'
from octavo.kernels import native_bindings

if native_bindings.why_absent():
    print(f"venv: there are no native kernels ({native_bindings.why_absent()}); casts take several times as long without them.")
    print("venv: install a C++ compiler and Python's headers, then: make clean venv")
PY
