#!/usr/bin/env bash
# Tests and benchmarks of a machine with a Hopper GPU, from a checkout: nothing is installed, built or downloaded.
# Its own python3 has torch, triton, numpy, safetensors, typer, rich and, for the tests, pytest and hypothesis.
#
#   scripts/gpu.sh tests [PYTEST ARGUMENTS]    tests/gpu, and the Triton kernels' tests on the device
#   scripts/gpu.sh unit [PYTEST ARGUMENTS]     what else needs a GPU, among the unit tests
#   scripts/gpu.sh prebuild [PART:I/N...]      compiles what benchmarks.hopper runs, all at once; no figures
#   scripts/gpu.sh bench DIR [PARTS=SECONDS...]  benchmarks.hopper, a process for each of PARTS (casts+linears=150)
#
# Whatever hangs is ended: tests after LIMIT (560) seconds and a part as Ctrl-C would end it, so that what was found is
# reported, and half a minute later by force; building after BUILD (200) seconds. PYTHON chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
unset TRITON_INTERPRET # on a GPU kernels are compiled
limited=(timeout --signal=INT --kill-after=30)

# Kernels are compiled a second each, into a cache that all share: by many workers where pytest-xdist is there. Another
# version's new warnings are not this run's question; the checkout stays as it is.
tested() {
    local spread=()
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then
        spread=(-n "${WORKERS:-12}" --dist worksteal)
        export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
    fi
    exec "${limited[@]}" "${LIMIT:-560}" "$PYTHON" -m pytest -q -p no:cacheprovider \
        --override-ini filterwarnings=default "${spread[@]}" "$@"
}

# casts+linears to --only casts --only linears
only() {
    printf -- '--only %s ' ${1//+/ }
}

# Into the caches that all processes share. What is tuned while others compile is tuned by noise, and forgotten.
prebuilt() {
    local part process started=()
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
    for part in "$@"; do
        # shellcheck disable=SC2046
        timeout --kill-after=10 "${BUILD:-200}" "$PYTHON" -m benchmarks.hopper \
            --seconds "${BUILD:-200}" --prebuild "${part#*:}" $(only "${part%:*}") &
        started+=($!)
    done
    for process in "${started[@]}"; do wait "$process" || echo "prebuild: a process ended with $?" >&2; done
    find "${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor_$(id -un)}" -name '*.best_config' -delete || true
}

# An error that a device does not recover from ends the process it happens in, and no other.
measured() {
    local out=$1 part parts seconds found
    shift
    for part in "$@"; do
        parts=${part%=*} seconds=${part#*=}
        # shellcheck disable=SC2046
        "${limited[@]}" $((seconds * 5 / 4 + 20)) "$PYTHON" -m benchmarks.hopper --out "$out/${parts//+/-}" \
            --seconds "$seconds" $(only "$parts") || echo "bench: $parts ended with $?" >&2
    done
    found=$(find "$out" -mindepth 2 -name 'hopper_*.json' -printf '--from %p\n' | sort)
    # shellcheck disable=SC2086
    [ -n "$found" ] && "$PYTHON" -m benchmarks.hopper --out "$out" $found
}

what=${1:-}
[ $# -gt 0 ] && shift
case $what in
tests) # but those of what machines without a GPU build and trace
    tested tests/gpu/test_casts.py tests/gpu tests/triton --ignore tests/triton/test_hopper_build.py \
        --ignore tests/triton/test_traced_layers.py "$@"
    ;;
unit)
    mapfile -t files < <(grep -rl 'mark\.gpu' tests/unit --include='test_*.py') # others import what is not there
    tested -m gpu "${files[@]}" "$@"
    ;;
prebuild)
    [ $# -gt 0 ] || set -- casts:0/2 casts:1/2 linears:0/2 linears:1/2 layer:0/3 layer:1/3 layer:2/3 \
        training:0/1 accumulation+experts+gemms:0/1
    prebuilt "$@"
    ;;
bench)
    out=${1:?scripts/gpu.sh bench DIR: say where the results go}
    shift
    [ $# -gt 0 ] || set -- accumulation=40 casts+linears=150 layer=130 training+experts+gemms=90
    measured "$out" "$@"
    ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
