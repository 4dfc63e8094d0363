"""Every kernel, compiled for Hopper in a process of its own: it assembles, and keeps its numbers in registers."""

import json
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = 227 << 10  # bytes a block can have on Hopper


@pytest.fixture(scope="module")
def builds() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.triton.hopper_build"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_every_kernel_fits_and_spills_nothing(builds: list[dict]) -> None:
    assert builds
    unfit = [build for build in builds if build["stack"] or build["shared"] > SHARED_MEMORY]
    assert not unfit


def test_products_of_codes_run_on_fp8_tensor_cores(builds: list[dict]) -> None:
    products = [build for build in builds if "gemm" in build["kernel"]]
    assert all(any("e4m3" in word or "e5m2" in word for word in build["tensor_core"]) for build in products)
