"""The export benchmark: its bars judge made-up findings, and a small trained run goes through it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import export as benchmark
from benchmarks import smollm2
from octavo.export.checkpoint_writer import SavedCheckpoint
from octavo.export.lockstep import LockstepAgreement
from octavo.export.sources import ConversionOptions
from tests.unit.cli.conftest import TINY, run_octavo

GOOD: dict[str, Any] = {
    "logits_error": 1e-5,
    "worst_error": 9e-4,
    "worst_layer": "",
    "greedy_tokens": 64,
    "greedy_equal": 64,
    "free_error": 0.3,
    "free_equal": 3,
}


def saved(nbytes=619, **changes):
    agreement = LockstepAgreement(**GOOD | changes)
    return SavedCheckpoint(
        folder=Path(),
        format="octavo",
        schemes={},
        left_out=(),
        notes=(),
        nbytes=nbytes,
        bf16_nbytes=1000,
        reader="octavo",
        agreement=agreement,
    )


def cells(**found):
    return benchmark.row("m", "octavo", saved(**found))


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        ({}, []),
        ({"logits_error": 1.1e-3}, [3]),
        ({"worst_error": float("nan")}, [4]),
        ({"greedy_equal": 63}, [5]),
        ({"greedy_tokens": 16, "greedy_equal": 16}, [5]),  # a context that is too short for 64
        ({"nbytes": 621}, [7]),
        ({"free_error": 2.0, "free_equal": 0}, []),
    ],
)
def test_each_bar_has_its_verdict(found, missed):
    row = cells(**found)
    assert len(row) == len(benchmark.COLUMNS)
    assert [place for place, cell in enumerate(row) if "(missed)" in cell] == missed
    assert [place for place, cell in enumerate(row) if "(met)" in cell] == [i for i in (3, 4, 5, 7) if i not in missed]


@pytest.fixture
def asked(monkeypatch):
    """What would be written and read back."""
    calls = []

    def note(*given):
        calls.append(given)
        return saved()

    monkeypatch.setattr(smollm2, "model_path", lambda: Path("smollm2.gguf"))
    monkeypatch.setattr(benchmark, "measured", note)
    return calls


def test_a_run_is_measured_beside_the_model(monkeypatch, capsys, asked):
    monkeypatch.setattr(sys, "argv", ["export.py", "--run", "runs/mine", "--cases", "hf-fp8;octavo", "--no-write"])
    benchmark.main()
    cases = (("hf-fp8", ConversionOptions()), ("octavo", ConversionOptions(recipe="mxfp8")))
    assert asked == [(source, *case) for source in ("smollm2.gguf", "runs/mine") for case in cases]
    rows = [line.strip("| ").split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[name, case] for name in ("SmolLM2-135M", "run mine") for case in ("hf-fp8", "octavo")]


def test_a_mix_is_measured_alone(monkeypatch, capsys, asked):
    monkeypatch.setattr(sys, "argv", ["export.py", "--mix", "mix.toml", "--no-write"])
    benchmark.main()
    assert asked == [("smollm2.gguf", "octavo", ConversionOptions(mix=Path("mix.toml")))]
    assert f"{saved().nbytes:,} bytes of weights." in capsys.readouterr().out


@pytest.mark.long
def test_export_benchmark_measures_a_trained_run(tmp_path):
    config, text, run = tmp_path / "run.toml", tmp_path / "own.txt", tmp_path / "tensorwise"
    config.write_text(TINY.replace("context = 32", "context = 96"))
    text.write_text("".join(f"{n} times {n % 7} makes {n * (n % 7)}, of course.\n" for n in range(2000)))
    assert run_octavo("train", "--config", config, "--data", text, "--out", run).exit_code == 0
    row = benchmark.row("run", "hf-fp8", benchmark.measured(str(run), "hf-fp8", ConversionOptions()))
    assert row[5] == "64 of 64 (met)"
    assert all(row[place].endswith("(met)") for place in (3, 4))
