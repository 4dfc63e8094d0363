"""The comparison itself: what it forgives, what it does not, and with which inputs."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.onnx.checks import EngineCheck, _remove_default_types, sample_inputs
from octavo.onnx.graph import BATCH, SEQUENCE, graph_of_module


def test_check_passes_only_without_errors():
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
        (lambda self, x, shift: {"y": self.linear(x) + shift}, "returns a dict"),
    ],
)
def test_forward_without_named_parameters_is_refused(monkeypatch, forward, message):
    monkeypatch.setattr(Shifted, "forward", forward)
    model = Shifted()
    octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match=message):
        graph_of_module(model, (torch.randn(2, 8), torch.randn(4)), torch.float32)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.zeros(4), {}),
        (torch.zeros(2, 8), {0: BATCH}),
        (torch.zeros(2, 3, 8), {0: BATCH, 1: SEQUENCE}),
        (torch.zeros(2, 3, 6, 8), {0: BATCH}),  # [B, C, H, W]
        (torch.zeros(2, 3, 4, 6, 8), {0: BATCH}),
        (torch.zeros(4, dtype=torch.long), {0: BATCH}),
        (torch.zeros(2, 5, dtype=torch.long), {0: BATCH, 1: SEQUENCE}),
        (torch.zeros(2, 3, 6, 8, dtype=torch.uint8), {0: BATCH}),
    ],
    ids=lambda each: f"{len(each.shape)}, {each.dtype}" if isinstance(each, torch.Tensor) else "",
)
def test_default_dynamic_dimensions_by_rank(given, wanted):
    model = Shifted()
    octavo.convert(model, "tensorwise")
    model.forward = lambda x, more: model.linear(x)  # type: ignore[method-assign]
    made = graph_of_module(model, (torch.randn(2, 8), given), torch.float32)
    assert made.shapes[1] == wanted


def test_dynamic_dimensions_can_be_set():
    model = Shifted()
    octavo.convert(model, "tensorwise")
    inputs = (torch.randn(2, 5, 8), torch.randn(5, 4))
    made = graph_of_module(model, inputs, torch.float32, varying=({1: SEQUENCE}, {0: SEQUENCE}))
    assert [each.shape for each in sample_inputs(made, vocabulary=None)] == [(2, 6, 8), (6, 4)]
    for wrong, words in (
        (({},), "has dimensions for 1 inputs, but there are 2"),
        (({2: "width"}, {}), r"has 'width' as dimension 2 of an input \[2, 5, 8\]"),
        (({-1: BATCH}, {}), "as dimension -1"),
        (({}, {2: BATCH}), r"dimension 2 of an input \[5, 4\]"),
    ):
        with pytest.raises(ConfigError, match=words):
            graph_of_module(model, inputs, torch.float32, varying=wrong)


@pytest.mark.parametrize("inputs", [(), torch.randn(2, 8), [torch.randn(2, 8)], (torch.randn(2, 8), 3), None])
def test_invalid_inputs_are_refused(inputs):
    model = Shifted()
    octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match=r"needs the tensors of one call; give inputs=\(tensor, …\)"):
        graph_of_module(model, inputs, torch.float32)


def test_empty_inputs_are_refused():
    model = Shifted()
    octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match=r"an input is \[0, 8\], which is empty"):
        graph_of_module(model, (torch.randn(0, 8), torch.randn(4)), torch.float32)


def test_only_default_types_of_casts_are_removed():
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = onnx.parser.parse_model("""
        <ir_version: 11, opset_import: ["" : 23]>
        casts (float[3] x, float s) => (float[3] y) {
            q = QuantizeLinear <axis = 0, precision = 0, output_dtype = 17> (x, s)
            y = DequantizeLinear <output_dtype = 0> (q, s)
        }""")
    _remove_default_types(model)
    names = [{each.name for each in node.attribute} for node in model.graph.node]
    assert names == [{"axis", "output_dtype"}, set()]
