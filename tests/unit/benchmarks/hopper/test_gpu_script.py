"""scripts/gpu.sh calls what it says: an interpreter that only notes its arguments stands in for Python."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "gpu.sh"
NOTES = """#!/usr/bin/env bash
echo "$*" >> "$NOTES"
case "$*" in
*linears*--from* | *--from*) ;;
*"$BREAKS"*) exit 3 ;;
*--out*) out=$(sed 's/.*--out \\([^ ]*\\).*/\\1/' <<< "$*"); mkdir -p "$out"; touch "$out/hopper_x_2026-01-31.json" ;;
esac
"""


@pytest.fixture
def called(tmp_path):
    python = tmp_path / "python"
    python.write_text(NOTES)
    python.chmod(0o755)

    def call(*arguments, breaks="nothing"):
        notes = tmp_path / "notes"
        own = {"PYTHON": str(python), "NOTES": str(notes), "BREAKS": breaks, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([SCRIPT, *arguments], env={**os.environ, **own}, check=False, capture_output=True)
        return done, notes.read_text().splitlines() if notes.exists() else []

    return call


def test_a_process_of_bench_that_crashes_ends_no_other(called, tmp_path):
    done, lines = called("bench", str(tmp_path), "accumulation=40", "casts+linears=150", breaks="accumulation")
    assert done.returncode == 0
    assert b"accumulation ended with 3" in done.stderr
    bench = "-m benchmarks.hopper --out"
    assert lines == [
        f"{bench} {tmp_path}/accumulation --seconds 40 --only accumulation",
        f"{bench} {tmp_path}/casts-linears --seconds 150 --only casts --only linears",
        f"{bench} {tmp_path} --from {tmp_path}/casts-linears/hopper_x_2026-01-31.json",
    ]


def test_every_part_is_measured_and_prebuilt_by_default(called, tmp_path):
    from benchmarks.hopper.runner import PARTS

    names = {part.name for part in PARTS} - {"card"}
    _, measured = called("bench", str(tmp_path))
    assert {word for line in measured for word in line.split()} >= names
    _, lines = called("prebuild")
    built = [line for line in lines if "--prebuild" in line]
    assert {word for line in built for word in line.split()} >= names
    assert all("--out" not in line for line in built)


def test_prebuild_deletes_autotuning_results_and_keeps_kernels(called, tmp_path):
    (tmp_path / "deep").mkdir()
    tuned, kept = tmp_path / "deep" / "a.best_config", tmp_path / "deep" / "a.py"
    tuned.touch()
    kept.touch()
    called("prebuild", "casts:0/1")
    assert not tuned.exists()
    assert kept.exists()


def test_tests_run_side_by_side(called):
    _, lines = called("tests", "-x")
    (line,) = (line for line in lines if "pytest" in line)
    assert "-n 12 --dist worksteal tests/gpu/test_casts.py tests/gpu tests/triton" in line
    assert "--ignore tests/triton/test_hopper_build.py --ignore tests/triton/test_traced_layers.py -x" in line
    assert "filterwarnings=default" in line


def test_wrong_arguments_show_the_usage(called):
    done, _ = called("nonsense")
    assert done.returncode == 2
    assert b"scripts/gpu.sh bench DIR" in done.stderr
