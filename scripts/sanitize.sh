#!/usr/bin/env bash
# The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: the whole oracle suite of theirs, what calls them
# (casts, backends, held codes, GGUF files, generation), and the trials of tests/native, every level this processor has; the
# pool of threads under ThreadSanitizer too. Needs .venv (make venv) and GCC's sanitizer libraries, which come with g++.
#
#   scripts/sanitize.sh [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

home=build/sanitized
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# An environment of its own, which sees .venv's packages but not its editable octavo.
.venv/bin/python -m venv --without-pip "$home"
own=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" >"$own/packages.pth"

cmake -S . -B "$home/cmake" -DPython_EXECUTABLE="$PWD/$home/bin/python" -DOCTAVO_SANITIZE=ON -DOCTAVO_LEVEL_CHECK=ON >/dev/null
cmake --build "$home/cmake" -j "$(nproc)" >/dev/null
"$home/cmake/levels"
rm -rf "$own/octavo"
cp -r src/octavo "$own/octavo"
find "$own/octavo" -name '*.so' -delete
cmake --install "$home/cmake" --prefix "$own" >/dev/null

# The threads of ours, and under ThreadSanitizer too.
"$home/cmake/threads"
g++ -std=c++17 -O1 -g -fsanitize=thread -Isrc/octavo/kernels/native tests/native/threads.cpp \
    src/octavo/kernels/native/pool.cpp -o "$home/threads" -pthread
"$home/threads"

# Python itself is not instrumented, so the runtime has to be there first; what it never frees is not our business. The
# sanitizer keeps freed memory for a while, so the test of what is given back is left out.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2 \
    "$home/bin/python" -m pytest -q -o pythonpath=. tests/oracle/test_native_*.py tests/unit/kernels \
    tests/unit/inference tests/unit/models tests/contract/test_backends.py tests/contract/test_stored_codes.py \
    -k "not memory_is_given_back" "$@"
