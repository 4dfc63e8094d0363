#!/usr/bin/env bash
# What a machine with a Hopper GPU runs from a checkout: nothing is installed, nothing is built, nothing is downloaded.
# Its own python3 has torch, triton, numpy, safetensors, typer, rich and, for the tests, pytest and hypothesis.
#
#   scripts/gpu.sh tests [PYTEST ARGUMENTS]    tests/gpu, and the Triton kernels' tests on the device
#   scripts/gpu.sh unit [PYTEST ARGUMENTS]     what else needs a GPU, among the unit tests
#   scripts/gpu.sh bench DIR [OPTIONS]         octavo bench hopper --out DIR
#
# Each ends within ten minutes, whatever hangs: as Ctrl-C would end it, so that what was found is reported, and half a
# minute later if need be by force. PYTHON chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
limited=(timeout --signal=INT --kill-after=30 560) # seconds
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
unset TRITON_INTERPRET # on a GPU kernels are compiled

what=${1:-}
[ $# -gt 0 ] && shift
# Another version's new warnings are not this run's question; the checkout stays as it is.
pytest=("${limited[@]}" "$PYTHON" -m pytest -q -p no:cacheprovider --override-ini filterwarnings=default)
case $what in
tests) exec "${pytest[@]}" tests/gpu tests/triton "$@" ;;
unit) exec "${pytest[@]}" -m gpu --continue-on-collection-errors tests/unit "$@" ;;
bench)
    out=${1:?scripts/gpu.sh bench DIR: say where the results go}
    shift
    exec "${limited[@]}" "$PYTHON" -m octavo bench hopper --out "$out" "$@"
    ;;
*)
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
