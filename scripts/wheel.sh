#!/usr/bin/env bash
# Build the source distribution and release wheels into dist/, and try them where no checkout is in reach.
#
#   scripts/wheel.sh                                 the wheel for .venv's Python
#   scripts/wheel.sh python3.12 python3.13 aarch64   also for these Pythons, and for .venv's Python on aarch64
#   scripts/wheel.sh --demo python3.12 python3.13    and the short demo there, from the wheel and what pip installs with it
#
# From Python 3.12 on, one wheel (cp312-abi3) is for all: python3.12 builds it, and python3.13 loads the same.
#
# Each wheel is compiled from the source distribution in a fresh folder; auditwheel refuses it where it needs more than
# PLATFORM has. The wheel for .venv's Python is tried in an environment that has only what its METADATA declares, linked from
# .venv, and the source distribution in one without a compiler. Other Pythons load their wheel's kernels; with --demo, pip
# installs torch and the rest from its index, gigabytes for each. Those for aarch64 are not run. Needs .venv (make venv), a
# network for other Pythons, and g++-aarch64-linux-gnu for aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."

PLATFORM=manylinux_2_34
export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
python=$PWD/.venv/bin/python lock=$PWD/requirements.lock dist=$PWD/dist link=$PWD/scripts/declared_environment.py
demo=
if [ "${1-}" = --demo ]; then demo=yes; shift; fi
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

environment() { # folder, what it installs...
    python -m venv --without-pip "$1"
    python -m pip --python "$1/bin/python" install --quiet --no-deps --no-build-isolation "${@:2}"
}

build() { # Python, machine, pip's options...
    rm -rf "$room/built"
    "$1" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$room/built" \
        --config-settings=cmake.define.OCTAVO_RELEASE=ON "${@:3}" "$room/source"
    # Where the kernels do not compile, pip makes a wheel without them, for any machine.
    ls "$room"/built/*-linux_"$2".whl >/dev/null
    "$python" -m auditwheel repair --plat "${PLATFORM}_$2" --wheel-dir "$dist" "$room"/built/*.whl 2>"$room/log" ||
        { cat "$room/log" >&2; return 1; }
}

build_for_aarch64() { # with .venv's headers, which are those of every 64-bit Linux
    local tag
    tag=$(python -c 'import sys; print("cpython-%d%d" % sys.version_info[:2])')
    CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.$tag-aarch64-linux-gnu.so build python aarch64 \
        --config-settings='cmake.args=-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=aarch64'
}

install_from_dist() { # Python
    "$1" -m pip install --quiet --no-deps --no-index --find-links "$dist" --only-binary :all: --pre octavo
}

build_for_python() { # Python: its wheel, built with the lock's tools unless dist/ has one, is loaded
    local home
    home=$(mktemp -d "$room/venvXXXX")
    "$1" -m venv "$home"
    install_from_dist "$home/bin/python" 2>/dev/null || build_with_tools "$home"
    "$home/bin/python" - <<'PY'  # octavo itself needs torch
import importlib.util, pathlib, sys, sysconfig

file, = pathlib.Path(sysconfig.get_path("purelib"), "octavo", "kernels").glob("_native*.so")
spec = importlib.util.spec_from_file_location("_native", file)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(f"wheel: Python {sys.version.split()[0]} loads {file.name}")
PY
    [ -z "$demo" ] || run_demo "$home"
}

run_demo() { # virtual environment that has the wheel: in a folder of its own, where no checkout is in reach
    "$1/bin/python" -m pip install --quiet "$(sed -nE 's/^# (torch==[0-9.]+)$/\1/p' "$lock")" "$dist"/octavo-*-cp312-abi3-*x86_64.whl
    (cd "$1" && bin/octavo doctor --env && bin/octavo demo --quick --out demo)
}

build_with_tools() { # virtual environment
    python - "$lock" '^(cmake|nanobind|ninja|packaging|pathspec|scikit[-_]build[-_]core)==' >"$room/tools" <<'PY'
import re, sys

for pin in re.split(r"\n(?=\S)", open(sys.argv[1]).read()):
    if re.match(sys.argv[2], pin):
        print(pin)
PY
    "$1/bin/python" -m pip install --quiet --require-hashes --no-deps -r "$room/tools"
    PATH="$1/bin:$PATH" build "$1/bin/python" x86_64
    install_from_dist "$1/bin/python"
}

rm -rf "$dist"
python -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$dist" >/dev/null
mkdir "$room/source"
tar -xzf "$dist"/octavo-*.tar.gz -C "$room/source" --strip-components=1
build python x86_64

cp -r tests pyproject.toml "$room/"
tools=$room/tools_without_compiler
mkdir "$tools"
ln -s "$(command -v cmake)" "$(command -v ninja)" "$tools/"
cd "$room"

environment "$room/venv" "$dist"/octavo-*.whl
python "$link" "$room/venv" octavo
venv/bin/octavo doctor --env
venv/bin/octavo demo --quick --out "$room/demo"
python "$link" "$room/venv" gfloat hypothesis ml-dtypes mmaemu pytest triton
venv/bin/python -m pytest -q -o pythonpath=. tests/oracle/test_native_*.py tests/unit/kernels

"$python" -m venv --without-pip "$room/bare"
python "$link" "$room/bare" scikit-build-core nanobind # what pip would install for building
PATH="$tools" CC=/bin/false CXX=/bin/false "$python" -m pip --python "$room/bare/bin/python" install --quiet --no-deps \
    --no-build-isolation "$dist"/octavo-*.tar.gz
python "$link" "$room/bare" octavo
bare/bin/python - <<'PY'
import octavo
import torch
from octavo.kernels import native_bindings

assert native_bindings.why_absent()
model = torch.nn.Linear(64, 64)
octavo.convert(model, recipe="tensorwise")
model(torch.randn(32, 64)).square().mean().backward()
assert model.weight.grad.isfinite().all()
print(f"wheel: the source distribution installs without a compiler: {native_bindings.why_absent()}")
PY

cd "$dist"
for target in "$@"; do
    case $target in aarch64) build_for_aarch64 ;; *) build_for_python "$target" ;; esac
done
echo "wheel: dist/ has $(ls | tr '\n' ' ')"
