"""The bars of the training step's benchmark, judged on made-up times."""

import sys

import pytest

from benchmarks import measure, train_step
from benchmarks.measure import Ratio
from benchmarks.trained_as_served import ENGINES
from octavo.training.config import demo_config

TIMES = {
    "bf16 autocast (torch)": 10.0,
    "bf16 autocast (octavo)": 1.0,
    "octavo tensorwise, bf16 around": 3.0,
    "torchao tensorwise eager, bf16 around": 4.0,
    "torchao tensorwise compiled, bf16 around": 2.0,
    "octavo tensorwise compiled, bf16 around": 0.9,
    "octavo tensorwise, fp32 around": 2.5,
    "torchao tensorwise eager, fp32 around": 2.0,
    "torchao tensorwise compiled, fp32 around": 2.6,
    "octavo tensorwise compiled, fp32 around": 2.7,
}
SECONDS = {name: [seconds] * 3 for name, seconds in TIMES.items()}


def test_every_bar_is_judged_against_both_bf16_and_both_of_torchaos(monkeypatch):
    monkeypatch.setattr(measure, "_has_bf16_instructions", lambda: True)
    rows = {bar: (measured.split()[0], verdict) for bar, measured, verdict in train_step.bar_rows(SECONDS, 1024)}
    bf16, fp32 = "octavo tensorwise, bf16 around", "octavo tensorwise, fp32 around"
    compiled = "octavo tensorwise compiled, {} around: at most 0.5 × torchao tensorwise compiled, {} around"
    assert rows == {
        f"{bf16}: at most 1.15 × bf16 autocast (torch)": ("0.30", "met"),
        f"{bf16}: at most 1.15 × bf16 autocast (octavo)": ("3.00", "missed"),
        f"{bf16}: at most 1.0 × torchao tensorwise eager, bf16 around": ("0.75", "met"),
        f"{bf16}: at most 0.5 × torchao tensorwise compiled, bf16 around": ("1.50", "missed"),
        compiled.format("bf16", "bf16"): ("0.45", "met"),
        f"{fp32}: at most 1.15 × bf16 autocast (torch)": ("0.25", "met"),
        f"{fp32}: at most 1.15 × bf16 autocast (octavo)": ("2.50", "missed"),
        f"{fp32}: at most 1.0 × torchao tensorwise eager, fp32 around": ("1.25", "missed"),
        f"{fp32}: at most 0.5 × torchao tensorwise compiled, fp32 around": ("0.96", "missed"),
        compiled.format("fp32", "fp32"): ("1.04", "missed"),
    }


def test_verdict_notes_an_emulated_bf16_base(monkeypatch):
    monkeypatch.setattr(measure, "_has_bf16_instructions", lambda: False)
    verdicts = {bar.partition(" × ")[2]: verdict for bar, _, verdict in train_step.bar_rows(SECONDS, 1024)}
    assert verdicts["bf16 autocast (torch)"] == "met, beside emulated BF16"
    assert verdicts["bf16 autocast (octavo)"] == "missed"
    assert verdicts["torchao tensorwise eager, fp32 around"] == "missed"
    assert verdicts["torchao tensorwise eager, bf16 around"] == "met, beside emulated BF16"


def test_the_model_has_the_width_asked_for():
    assert train_step.config_of(128).model == demo_config().model
    wide = train_step.config_of(1024)
    assert (wide.model.hidden_size, wide.model.num_layers, wide.model.num_heads) == (1024, 2, 16)
    assert wide.training == demo_config().training


@pytest.mark.parametrize("rounds", [2, 7])
def test_result_names_its_command(monkeypatch, rounds, written):
    monkeypatch.setattr(sys, "argv", ["train_step", "--rounds", str(rounds)])
    monkeypatch.setattr(train_step, "contestants", lambda _: {})
    monkeypatch.setattr(train_step, "interleaved", lambda _, rounds, warmup: {**SECONDS, "fp32": [1.0] * rounds})
    monkeypatch.setattr(train_step, "ratio", lambda *_: Ratio(0.4, 0.4, 0.4))
    train_step.main()
    lines = written()
    assert lines[2].startswith(f"`python -m benchmarks.train_step --rounds {rounds}`, ")
    assert f"Median of {rounds} interleaved rounds" in lines[-1]
    assert sum("| met" in line for line in lines) == 10


def test_every_call_of_a_bar_is_timed():
    pytest.importorskip("torchao", reason="torchao is not installed")
    rows = list(train_step.bar_rows({name: [1.0] * 3 for name in train_step.contestants(demo_config())}, 128))
    assert len(rows) == 10


def test_steps_as_served_are_timed_beside_their_recipes(monkeypatch, written):
    calls = train_step.served_contestants(demo_config(quick=True))
    assert {*calls} == {*ENGINES, *ENGINES.values()}
    monkeypatch.setattr(sys, "argv", ["train_step", "--as-served"])
    seconds = {name: [6.0 if name in ENGINES else 2.0] * 3 for name in calls}
    monkeypatch.setattr(train_step, "interleaved", lambda *_, **__: seconds)
    train_step.main()
    lines = written()
    assert "| te-block | blockwise | 3.00 (3.00–3.00) |" in lines
    assert sum("3.00" in line for line in lines) == len(ENGINES)
