"""The verdict on the best mix, judged on made-up figures; the model itself is not run here."""

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import sensitivity, smollm2
from octavo.language_model import LanguageModel
from octavo.quantization.sensitivity.ablation import Increase, compare
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.mix import Mix, save_mix
from octavo.quantization.sensitivity.study import Budget, MixResult, Sensitivity, measure_sensitivity
from octavo.quantization.sensitivity.units import units_of
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    model = small_llama()
    budget = Budget(perplexity=sensitivity.PERPLEXITY, bytes_share=sensitivity.BYTES)
    return measure_sensitivity(model, windows_of(model, 2), windows_of(model, 2, seed=1), budget=budget, true_pairs=0)


def with_best(found: Sensitivity, *, percent: float, share: float) -> Sensitivity:
    nats = math.log1p(percent / 100)
    true = Increase(nats=nats, error=0.001, divergence=0.01, windows=40)
    made = MixResult(
        name="budget", chosen={}, bytes=1, bytes_share=share, fp8_products=0.25, predicted=nats, verified=true
    )
    return replace(found, best=made)


@pytest.mark.long
@pytest.mark.parametrize(
    ("percent", "share", "outcome"),
    [(0.99, 0.6, "met"), (1.01, 0.55, "missed"), (0.5, 0.601, "missed"), (-0.2, 0.55, "met")],
)
def test_both_bars_count(found, percent, share, outcome):
    row = list(sensitivity.table(with_best(found, percent=percent, share=share)))[2]
    assert row.startswith(f"| best within 1.0 % and 0.60 | {share:.4f} | 25% |")
    assert f"| {percent:+.2f}% |" in row
    assert row.endswith(f"| {outcome} |")


def test_no_mix_is_a_miss(found):
    without = replace(found, best=None)
    assert not any("best within" in line for line in sensitivity.table(without))
    assert "No mix was within both budgets on the windows it was chosen on: missed." in sensitivity.notes(without, 1.0)
    assert any("ranked by an estimate" in line for line in sensitivity.notes(found, 1.0))


def test_the_others_stand_beside_it_without_a_verdict(found):
    rows = list(sensitivity.table(with_best(found, percent=0.5, share=0.55)))[3:]
    assert len(rows) == len(found.front) + len(found.presets)
    assert all(row.endswith("| – |") for row in rows)
    assert {row.split(" | ")[-2] for row in rows} == {"2"}


def test_a_mix_is_measured_on_the_windows_after(found, monkeypatch, tmp_path, capsys):
    """Beside what the search's own comparison finds of the same mix there."""
    model, windows = small_llama(), windows_of(small_llama(), 6)
    nowhere: Any = None
    language_model = LanguageModel(model=model, tokenizer=nowhere, context=windows.shape[1], source="small")
    monkeypatch.setattr(smollm2, "load", lambda: language_model)
    monkeypatch.setattr(sensitivity, "evaluation_windows", lambda *_, count, length: windows[:count])
    units = units_of(model, ["tensorwise"])
    chosen = {unit.path: "tensorwise" for unit in units}
    save_mix(Mix.of(units, chosen), tmp_path / "mix.toml")
    monkeypatch.setattr("sys.argv", ["x", "--again", str(tmp_path / "mix.toml"), "--verify", "3", "--no-write"])
    sensitivity.main()
    other = small_llama()
    with in_bf16(other):
        nats, (true,) = compare(other, units, [chosen], windows[3:])
    printed = capsys.readouterr().out
    assert f"- {true.nats:+.4f} ± {true.error:.4f} nats; BF16 loses {nats:.4f}" in printed
    assert "The 3 windows of 512 tokens after the first 3" in printed
