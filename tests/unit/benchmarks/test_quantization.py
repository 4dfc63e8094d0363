"""The quantization benchmark: its bars judge made-up scores, and a small model goes through all of it."""

import math

import pytest
import torch

import octavo
from benchmarks import quantization as benchmark
from benchmarks.quantization import CACHE_NATS, REFERENCE_NATS, STATIC_NATS, cache_bars, comparison_table, format_bars
from octavo.quantization.comparison.comparison import Entry, FormatComparison
from octavo.quantization.comparison.scores import Scores, WindowScore
from octavo.quantization.comparison.storage import Storage
from tests.unit.quantization.tiny_models import CONTEXT, language_model, windows


def comparison(**gaps):
    """BF16 at 2 and 3 nats in two windows; others as much above it, in each window, as is given."""
    nats = {"bf16": (0.0, 0.0)} | gaps
    entries = []
    for name, (one, other) in nats.items():
        scores = tuple(WindowScore(nats=n, agreement=0.9, divergence=0.01) for n in (2.0 + one, 3.0 + other))
        storage = Storage(file_bytes=200_000_000 if name == "bf16" else 121_000_000, memory_bytes=122_000_000)
        entries.append(Entry(name=name, scores=Scores(windows=scores), storage=storage, quantized=210))
    return FormatComparison(reference="bf16", entries=tuple(entries), windows=2, length=512)


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [
        ((REFERENCE_NATS - 0.001, REFERENCE_NATS + 0.002), "met; +0.0005"),
        ((REFERENCE_NATS + 0.010, REFERENCE_NATS + 0.012), "missed; +0.0110"),
        ((REFERENCE_NATS - 0.010, REFERENCE_NATS - 0.012), "missed; -0.0110"),
    ],
)
def test_dynamic_has_to_be_at_the_reference(gaps, outcome):
    assert math.exp(REFERENCE_NATS) == pytest.approx(1.0239, abs=1e-4)
    assert f"fp8-dynamic: {outcome}" in format_bars(comparison(**{"fp8-dynamic": gaps, "fp8-static": (0.0, 0.0)}))[0]


def test_static_has_its_most():
    for nats, outcome in ((STATIC_NATS - 1e-4, "met"), (STATIC_NATS + 1e-4, "missed")):
        found = comparison(**{"fp8-dynamic": (0.0, 0.0), "fp8-static": (nats, nats)})
        assert format_bars(found)[1].startswith(
            f"- fp8-static: {outcome}; +{'2.99' if nats < STATIC_NATS else '3.01'} %"
        )


def test_a_cache_has_two_bars():
    for nats, outcome in ((CACHE_NATS - 1e-5, "met"), (CACHE_NATS + 1e-4, "missed")):
        gaps = dict.fromkeys(("fp8-kv", "fp8-kv-centred"), (nats, nats))
        lines = cache_bars(comparison(**gaps), 64)
        assert [line.split(" in perplexity, +0.5")[0] for line in lines] == [
            f"- fp8-kv: {outcome}",
            f"- fp8-kv-centred: {outcome}",
        ]
        assert all(line.endswith("missed in bytes, 0.516 of BF16's (bar 0.5)") for line in lines)


def test_a_table_has_what_was_scored():
    extra = {"bf16": 3_000_000, "fp8-dynamic": None}
    lines = comparison_table(comparison(**{"fp8-dynamic": (0.02, 0.04)}), extra)
    assert lines[2] == f"| bf16 | {math.exp(2.5):.4f} |  |  |  |  | 200.0 | 1.000 | 122.0 | 125.0 |"
    scores = f"| fp8-dynamic | {math.exp(2.53):.4f} | +3.05 % | +0.0300 ± 0.0100 | 90.00% | 0.01000 |"
    assert lines[3] == f"{scores} 121.0 | 0.605 | 122.0 | – |"
    assert comparison_table(comparison())[0].count("|") == 7


@pytest.mark.long
def test_quantization_benchmark_runs_on_a_small_model(monkeypatch):
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(benchmark, "WINDOW", 16)
    monkeypatch.setattr(benchmark, "CACHE_WINDOW", CONTEXT)
    monkeypatch.setattr(benchmark, "SPEED_LENGTH", 8)
    monkeypatch.setattr(benchmark, "_training_text", lambda _model, count, length: windows(count, length))
    model, tuned = language_model(), language_model()
    octavo.convert(tuned.model, "tensorwise")
    lines = benchmark.format_lines(model, tuned, 2, 2, speed=True)
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert [row for row in rows if row.startswith("| fp8-dynamic")] == ["| fp8-dynamic"] * 3
    assert "| int8" in rows
    assert "| fp8-static" in rows
    assert "| fp8-qat" in rows
    assert any(line.startswith("- fp8-dynamic: m") for line in lines)
    lines = benchmark.cache_lines(model, 2)
    assert [line.split(":")[0] for line in lines[-2:]] == ["- fp8-kv", "- fp8-kv-centred"]
    assert torch.is_grad_enabled()
