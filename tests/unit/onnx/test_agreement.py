"""A graph that differs from its model, in a layer or between two, is found by name, in FP8 as in FP32."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import CheckpointError
from octavo.export.lockstep import relative_error
from octavo.onnx import decoder as decoder_module
from octavo.onnx import export as module_under_test
from octavo.onnx.agreement import RESULT, layer_errors, lockstep_errors
from octavo.onnx.graph import graph_of_decoder, graph_of_module
from tests.unit.quantization.tiny_models import LINEARS, language_model, windows


def mlp():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.Tanh()).eval()
    octavo.convert(model, "tensorwise")
    return model, graph_of_module(model, (torch.randn(2, 5, 8),), torch.float32)


@pytest.fixture(scope="module")
def source():
    model = language_model()
    octavo.convert(model.model, "rowwise")
    return model


def decoder(source, dtype=torch.float32, attention=None):
    return graph_of_decoder(source, dtype, has_cache=False, attention=attention)


def between(source, graph):
    return lockstep_errors(source.model, graph, lambda: source.logits(windows()), lambda: graph.module(windows()))


def without_a_mask(monkeypatch):
    real = decoder_module.exported_attention

    def seeing_all(queries, keys, values, unseen, casts):
        return real(queries, keys, values, torch.zeros_like(unseen), casts)

    monkeypatch.setattr(decoder_module, "exported_attention", seeing_all)


def test_wrong_layer_is_detected():
    model, made = mlp()
    run = lambda: model(made.inputs[0])  # noqa: E731 (what layer_errors calls)
    assert max(layer_errors(model, made, run).values()) < 1e-6
    made.linears["2"].scale.mul_(1.01)
    errors = layer_errors(model, made, run)
    assert errors["0"] < 1e-6
    assert errors["2"] > 1e-3
    assert not any(module._forward_hooks for module in model.modules())


def test_errors_between_layers_are_detected():
    model, made = mlp()
    run, run_graph = lambda: model(made.inputs[0]), lambda: made.module(made.inputs[0])
    errors = lockstep_errors(model, made, run, run_graph)
    assert set(errors) == {"0", "2", RESULT}
    assert max(errors.values()) < 1e-6
    made.module[1] = nn.GELU()
    errors = lockstep_errors(model, made, run, run_graph)
    assert errors["2"] > 1e-2
    assert max(errors["0"], errors[RESULT]) < 1e-6  # it goes on from what the model's layer made
    made.module[3] = nn.Sigmoid()
    assert lockstep_errors(model, made, run, run_graph)[RESULT] > 1e-2
    for module in (model, made.module):
        assert not any(each._forward_hooks for each in module.modules())


def test_different_number_of_calls_is_detected():
    model, made = mlp()
    run, run_graph = lambda: model(made.inputs[0]), lambda: made.module(made.inputs[0])
    once_more = lambda: (made.module[0](made.inputs[0]), run_graph())[1]  # noqa: E731
    once_less = lambda: (model[0](made.inputs[0]), run())[1]  # noqa: E731
    assert lockstep_errors(model, made, run, once_more)["0"] == torch.inf
    assert lockstep_errors(model, made, once_less, run_graph)["0"] == torch.inf


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_decoder_agrees_between_its_layers(source, dtype, most):
    errors = between(source, decoder(source, dtype, attention=windows()))
    assert len(errors) == LINEARS + 1
    assert max(errors.values()) < most  # though attention is in FP8


def test_decoder_without_its_mask_is_detected(source, monkeypatch):
    without_a_mask(monkeypatch)
    made = decoder(source)
    assert max(layer_errors(source.model, made, lambda: source.logits(windows())).values()) < 1e-5
    errors = between(source, made)
    wrong = {path for path, error in errors.items() if error > 1e-4}
    assert {f"model.layers.{index}.self_attn.o_proj" for index in range(2)} == wrong


def test_decoder_without_its_mask_is_not_exported(source, monkeypatch):
    without_a_mask(monkeypatch)
    made = decoder(source)
    with torch.no_grad():
        assert relative_error(made.module(windows()), source.logits(windows())) > 0.1
    with pytest.raises(
        CheckpointError, match=r"the input of layer 'model.layers.\d.self_attn.o_proj' differs by .* from the"
    ):
        module_under_test._worst_lockstep(source, made, (windows(),), torch.float32)


def test_uncalled_layer_is_an_error():
    class Spare(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Spare(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    octavo.convert(model, "tensorwise")
    inputs = (torch.randn(2, 8),)
    with pytest.raises(CheckpointError, match="layer '1' is not called with these inputs"):
        module_under_test._worst_layer(model, graph_of_module(model, inputs, torch.float32), inputs, torch.float32)
