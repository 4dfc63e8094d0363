"""The examples run, and FP8 learns what FP32 learns."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_learns_in_every_precision():
    result = subprocess.run([sys.executable, EXAMPLES / "own_loop.py"], capture_output=True, text=True, check=True)
    losses = {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}
    assert list(losses) == ["fp32", "tensorwise", "delayed"]
    assert losses["fp32"] < 2.8  # letters alone, by their frequencies, cost about 3.0
    assert max(losses.values()) - min(losses.values()) < 0.05
    assert len(re.findall("2 layers in FP8", result.stdout)) == 2
