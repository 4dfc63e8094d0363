"""The zoo of architectures: what a plain model cannot do is no failure of octavo, and each architecture counts once."""

from importlib import import_module

import pytest
import torch
from torch import nn

import octavo
from benchmarks import model_zoo


class Tiny(nn.Module):
    """A language model of one layer; ``fault`` is raised in its forward."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.table, self.up, self.lm_head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.fault = fault

    def forward(self, input_ids, decoder_input_ids=None):
        if self.fault == "plain" or (self.fault == "converted" and isinstance(self.up, octavo.nn.Linear)):
            raise ValueError(f"a fault of the {self.fault} model\nwith more lines")
        return (self.lm_head(self.up(self.table(input_ids))),)


def too_large():
    raise ValueError("too large")


def test_failures_are_those_of_converted_models_and_an_architecture_counts_once(capsys):
    rows, unbuilt = model_zoo.measure_all(
        [
            ("good", "causal", Tiny),
            ("good", "encoder", too_large),
            ("broken", "causal", lambda: Tiny("plain")),
            ("broken", "encoder", too_large),
            ("late", "causal", too_large),
            ("late", "encoder-decoder", Tiny),
            ("ours", "causal", lambda: Tiny("converted")),
        ]
    )
    assert [(each.name, each.family) for each in rows] == [
        ("good", "causal"), ("late", "encoder-decoder"), ("ours", "causal"),
    ]  # fmt: skip
    assert [each.problem for each in rows] == ["", "", "ValueError: a fault of the converted model"]
    assert rows[0].after == 64 / (64 + 8 * 64)
    assert unbuilt == {"broken": "ValueError: a fault of the plain model"}
    lines = model_zoo.result(rows, unbuilt)
    assert lines[0] == ("3 architectures, each once (2 causal, 1 encoder-decoder); 1 failed that run without octavo.")
    assert lines[-3:] == [
        "Not built, with the plain model's reason: 1.", "", "- broken: ValueError: a fault of the plain model",
    ]  # fmt: skip
    assert "late causal not built: ValueError: too large" in capsys.readouterr().out


def test_a_weight_that_the_report_leaves_out_is_a_failure(monkeypatch):
    class Named(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(1, 8))

    assert model_zoo.row("whole", Named).problem == ""
    monkeypatch.setattr(import_module("octavo.convert.conversion"), "bare_weights", lambda *_: [])
    assert model_zoo.row("lacking", Named).problem == "not in the report: extra"


@pytest.mark.parametrize("family", model_zoo.FAMILIES)
def test_every_family_has_inputs(family):
    assert {each.shape[0] for each in model_zoo.inputs_of(family).values()} == {2}
