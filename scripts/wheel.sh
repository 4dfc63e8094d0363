#!/usr/bin/env bash
# Build the release wheel and try it where no checkout is in reach: a new environment that has .venv's packages, but octavo
# from the wheel alone. Needs .venv (make venv). The wheel stays in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"
rm -rf dist
python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python -m venv "$room/venv"
own=$("$room/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$room/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps dist/*.whl
python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/packages.pth"
cp -r tests pyproject.toml "$room/"

cd "$room"
venv/bin/octavo doctor --env
venv/bin/python -m pytest -q -o pythonpath=. tests/oracle/test_native_*.py tests/unit/kernels
echo "wheel: $(basename "$OLDPWD"/dist/*.whl) works"
