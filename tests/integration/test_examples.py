"""The examples run, and FP8 learns what FP32 learns."""

import math
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


def test_the_articles_example_learns_and_predicts():
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "article_training.py"], capture_output=True, text=True, check=True
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * math.log(1000) < losses[0]  # half of what a uniform guess costs
    assert "predictions: [4, 32]" in result.stdout
