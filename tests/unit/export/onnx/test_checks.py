"""The comparison itself: what it forgives, what it does not, and that codes are handed over in the graph's order."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.export.onnx.checks import EngineCheck, _TheseCodes, sample_inputs
from octavo.export.onnx.graph import BATCH, SEQUENCE, graph_of_module
from octavo.export.onnx.operators import to_codes


def test_codes_are_handed_over_once_for_casts_of_one_tensor():
    x, other, encode = torch.ones(2), torch.ones(2), torch.tensor(2.0)
    with _TheseCodes([torch.tensor([4.0, 8.0]), torch.tensor([16.0, 32.0])]):
        first, again, second = (to_codes(each, encode) for each in (x, x, other))
    assert first.float().tolist() == again.float().tolist() == [4.0, 8.0]
    assert second.float().tolist() == [16.0, 32.0]
    assert to_codes(x, encode).float().tolist() == [2.0, 2.0]


def test_what_passes():
    good = EngineCheck(engine="e", casts=1, codes=9, error=1e-5, allowed=1e-4, free_error=0.5)
    assert good.passed
    assert "0 of 9 codes and 0 scales are not octavo's" in str(good)
    assert EngineCheck(engine="e", skipped="no").passed
    for wrong in ({"wrong_codes": 1}, {"wrong_scales": 1}, {"error": 2e-4}, {"error": float("inf")}):
        assert not EngineCheck(engine="e", **{"allowed": 1e-4} | wrong).passed


def graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    octavo.convert(model, "tensorwise")
    return model, graph_of_module(model, (torch.randn(2, 5, 8),), torch.float32)


def test_leading_dimensions_vary():
    _, made = graph()
    assert made.names == ("input",)
    assert made.shapes == ({0: BATCH, 1: SEQUENCE},)
    assert [each.shape for each in sample_inputs(made, vocabulary=None)] == [(3, 6, 8)]


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, shift):
        return self.linear(x) + shift


def test_an_input_whose_shape_does_not_vary_keeps_it():
    model = Shifted()
    octavo.convert(model, "tensorwise")
    made = graph_of_module(model, (torch.randn(2, 8), torch.randn(4)), torch.float32)
    assert [each.shape for each in sample_inputs(made, vocabulary=None)] == [(3, 8), (4,)]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, *x: self.linear(x[0]), "has no name for each of 2 inputs"),
        (lambda self, x: self.linear(x), "has no name for each of 2 inputs"),
        (lambda self, x, shift: {"y": self.linear(x) + shift}, "gives a dict"),
    ],
)
def test_modules_that_a_graph_cannot_name(monkeypatch, forward, message):
    monkeypatch.setattr(Shifted, "forward", forward)
    model = Shifted()
    octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match=message):
        graph_of_module(model, (torch.randn(2, 8), torch.randn(4)), torch.float32)
