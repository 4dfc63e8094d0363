"""Parameters rounded for a forward pass: which, for how long, and the gradients of those that stay."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.nn.parameter_rounding import round_parameters, rounded_parameters


def test_tied_parameters_stay_tied_and_all_come_back():
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    before = dict(model.named_parameters())
    context = rounded_parameters(model, torch.bfloat16)
    for _ in range(2):  # it can be entered again
        with context:
            assert model[0].weight is model[2].weight
            assert {p.dtype for m in model for p in m._parameters.values() if p is not None} == {torch.bfloat16}
            y = model(torch.arange(8))
        assert y.dtype is torch.bfloat16
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in before.values())


def test_parameters_come_back_after_an_error_and_it_does_not_nest():
    layer = nn.Linear(4, 4)
    weight, context = layer.weight, rounded_parameters(layer, torch.bfloat16)
    with pytest.raises(ConfigError, match="active already"), context, context:
        pass
    assert layer.weight is weight
    with context:
        assert layer.weight is not weight


def test_codes_stay_codes():
    model = nn.Sequential(nn.Linear(16, 16))
    octavo.convert(model.requires_grad_(False), "rowwise", frozen="fp8", convert_head=True)
    codes = model[0].stored_weight
    with rounded_parameters(model, torch.bfloat16):
        assert model[0].stored_weight is codes


def test_rounding_for_good_keeps_dtypes_and_the_forward_pass():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8).bfloat16()
    context = rounded_parameters(layer, torch.bfloat16)
    with context:
        before = layer(x)
    round_parameters(layer, torch.bfloat16)
    assert layer.weight.dtype is torch.float32
    assert torch.equal(layer.weight, layer.weight.bfloat16().float())
    with context:
        assert torch.equal(layer(x), before)
