#!/usr/bin/env bash
# The check that `make test` and `make test-all` run: format, lint, types, tests. One line each with its time. A red format
# or lint ends it; types are checked beside the tests, which leave a part of two cores idle. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

# The suite runs in two processes; one thread each keeps them out of each other's way on two cores.
export OMP_NUM_THREADS=1
# A test with more threads would else burn a core while they wait for one that the other process has.
export OMP_WAIT_POLICY=passive
# Kept bytecode halves the time to collect the tests, also where the environment would have none written.
unset PYTHONDONTWRITEBYTECODE
log=$(mktemp) types_log=$(mktemp)
trap 'rm -f "$log" "$types_log"; [ -z "$(jobs -p)" ] || kill $(jobs -p)' EXIT

report() { # name, verdict, start in nanoseconds
    awk -v name="$1" -v verdict="$2" -v start="$3" -v end="$(date +%s%N)" \
        'BEGIN { printf "%-7s %-6s %6.1f s\n", name, verdict, (end - start) / 1e9 }'
}

quietly() { # name, command...: its output is shown only when it fails
    local name=$1 start
    shift
    start=$(date +%s%N)
    if "$@" >"$log" 2>&1; then
        report "$name" ok "$start"
    else
        report "$name" FAILED "$start"
        cat "$log"
        exit 1
    fi
}

quietly format .venv/bin/ruff format --check .
quietly lint .venv/bin/ruff check .
.venv/bin/mypy >"$types_log" 2>&1 &

red=0
start=$(date +%s%N)
if .venv/bin/pytest -n 2 --dist worksteal "$@"; then
    report tests ok "$start"
else
    report tests FAILED "$start"
    red=1
fi
if wait $!; then
    echo "types   ok     beside the tests"
else
    echo "types   FAILED"
    cat "$types_log"
    red=1
fi
exit $red
