"""What the benchmark of served recipes makes of losses, and that a small model goes through."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.serving_recipes import Measured, measured, table
from octavo import E4M3
from octavo.formats import BF16, FP32
from octavo.inference import ServingRecipe
from octavo.language_model import load_language_model
from tests.unit.models import small_gguf


def test_differences_are_paired_with_the_first():
    rows = table([Measured("bf16", BF16, [2.0, 3.0], 1000), Measured("fp8", E4M3, [2.1, 3.3], 503)])
    cells = [row.strip("| ").split(" | ") for row in rows[2:]]
    assert cells[0][:3] == ["bf16", "BF16", f"{math.exp(2.5):.4f}"]
    assert cells[1][1] == E4M3.name
    assert cells[1][3:] == [f"{100 * math.expm1(0.2):+.2f} %", "+0.2000 ± 0.1000", "0.503"]


def test_the_loss_is_that_of_the_model(tmp_path):
    """In FP32's cache and BF16's weights, from torch alone."""
    path = small_gguf.write(tmp_path / "model.gguf")
    model = load_language_model(path)
    windows = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
    found = measured(path, ServingRecipe.BF16, tmp_path / "none", windows, fmt=FP32)
    with torch.no_grad():
        for layer in model.model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(layer.weight.bfloat16())
        logits = model.logits(windows[:, :-1])
    wanted = [F.cross_entropy(one, window[1:]).item() for one, window in zip(logits, windows, strict=True)]
    assert found.nats == pytest.approx(wanted, rel=1e-5)
