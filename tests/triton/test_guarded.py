"""Products read nothing beyond their operands, and write nothing beyond their results."""

import os
import subprocess
import sys

import pytest


@pytest.mark.long
def test_products_touch_nothing_beyond_their_tensors() -> None:
    """In a process of its own, which a touch of forbidden memory ends. Experts' offsets lie outside of x."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "tests.triton.guarded"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    survived = finished.stdout.splitlines()
    assert finished.returncode == 0, f"after {survived[-1:]} it ended with {finished.returncode}: {finished.stderr}"
    assert survived
