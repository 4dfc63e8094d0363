"""The examples run, and FP8 learns what FP32 learns."""

import hashlib
import itertools
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_learns_in_every_precision():
    result = subprocess.run([sys.executable, EXAMPLES / "own_loop.py"], capture_output=True, text=True, check=True)
    losses = {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}
    assert list(losses) == ["fp32", "tensorwise", "delayed"]
    assert losses["fp32"] < 2.8  # letters alone, by their frequencies, cost about 3.0
    assert max(losses.values()) - min(losses.values()) < 0.05
    assert len(re.findall("2 layers in FP8", result.stdout)) == 2


ARTICLE = EXAMPLES / "article_training.py"
ARTICLE_SHA256 = "60e2f8f3578c82bc278ea52d5eb420d428e47f4fa7203479d05059e8cadcd5d4"  # without blanks at ends of lines


def _losses(printed):
    return [float(loss) for loss in re.findall(r"^Batch +\d+ \| Loss: (\d+\.\d+)$", printed, re.MULTILINE)]


def test_the_articles_program_is_the_articles_but_for_one_import():
    _, program = ARTICLE.read_text().split("# fmt: off\n")
    theirs = program.replace("from octavo.compat.transformer_engine", "from transformer_engine", 1)
    assert hashlib.sha256(theirs.encode()).hexdigest() == ARTICLE_SHA256


def test_the_articles_program_trains_and_predicts():
    """Its labels are random: the loss stays near a uniform guess's and can only lie above it."""
    result = subprocess.run(
        [sys.executable, "-W", "error", ARTICLE], capture_output=True, text=True, check=True, timeout=120
    )
    losses = _losses(result.stdout)
    assert len(losses) == 10
    assert all(abs(loss - math.log(1000)) < 0.4 for loss in losses)
    assert "Training complete!" in result.stdout
    assert "Inference Output Shape: torch.Size([4, 32])" in result.stdout


def test_on_one_fixed_batch_the_articles_program_learns(monkeypatch, capsys):
    """The same functions; random numbers are drawn once for inputs and labels."""
    program = runpy.run_path(str(ARTICLE))
    draws = itertools.cycle([torch.randint(0, 1000, (8, 64)) for _ in ("inputs", "labels")])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: next(draws))
    model = program["train_with_fp8"]()
    losses = _losses(capsys.readouterr().out)
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * math.log(1000) < losses[0]  # half of what a uniform guess costs
    program["inference_example"](model)
    assert "Inference Output Shape: torch.Size([8, 64])" in capsys.readouterr().out


def test_the_articles_quantization_aware_training_learns_and_leaves_fp8():
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "qat_simple_lm.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    losses = re.findall(r"^Epoch \d, Batch \d+, Loss: (\d+\.\d+)$", result.stdout, re.MULTILINE)
    assert len(losses) == 12
    assert float(losses[0]) > 4.5  # log(128) is 4.85
    fp8, fp32 = map(float, re.findall(r"^Held-out loss [^:]+: +(\d\.\d+)", result.stdout, re.MULTILINE))
    assert fp8 < 2.8  # letters alone, by their frequencies, cost about 3.0
    assert fp8 != fp32
    assert abs(fp8 - fp32) < 0.02
    assert "4 layers run static, 2 stay as they are" in result.stdout
    assert "fast path" not in result.stdout
    layers = re.findall(r"transformer\.(\S+)\.input\.scale 0\.\d+", result.stdout)
    assert layers == ["self_attn.out_proj", "self_attn.in_proj", "linear1", "linear2"]


def test_rollouts_of_a_matched_policy_are_on_policy(tmp_path):
    page = tmp_path / "new" / "rl.html"
    result = subprocess.run(
        [sys.executable, EXAMPLES / "rl_fp8_rollouts.py", "--seeds", "2", "--updates", "3", "--out", page],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    k3 = {m[1]: m[2] for m in re.finditer(r"^([\w-]+) +\S+ ± \S+ +\S+ ± \S+ +(\S+ ± \S+)", result.stdout, re.MULTILINE)}
    assert set(k3) == {"fp32", "vllm-block", "vllm-block-ue8m0"}
    assert k3["vllm-block-ue8m0"] == "0 ± 0"  # bit for bit
    assert min(float(k3[name].split()[0]) for name in ("fp32", "vllm-block")) > 0
    assert "vllm-block-ue8m0 − fp32" in result.stdout
    assert "plotly" in page.read_text()
