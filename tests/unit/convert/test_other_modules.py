"""``nn.Bilinear`` in FP8: against a linear layer of all its matrices, torch's own, and back again."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.convert import left_as_they_are, routers, unfuse_experts
from octavo.functional import fp8_linear
from octavo.numerics import sqnr_db


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 7, 12, dtype=dtype, requires_grad=True), torch.randn(2, 7, 10, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_it_is_a_linear_layer_of_its_matrices_and_sums_over_the_first_input(recipe, bias):
    x1, x2 = tensors()
    plain = nn.Sequential(nn.Bilinear(12, 10, 5, bias=bias))
    model = copy.deepcopy(plain)
    assert octavo.convert(model, recipe).weights == ("0.weight",)
    own, bilinear = model[0], plain[0]
    assert isinstance(own, nn.Bilinear)
    assert isinstance(bilinear, nn.Bilinear)
    y = own(x1, x2)
    weight = bilinear.weight
    mapped = fp8_linear(x2, weight.reshape(5 * 12, 10), None, recipes.get(recipe)).unflatten(-1, (5, 12))
    expected = torch.einsum("btnk,btk->btn", mapped, x1)
    assert torch.allclose(y, expected + bilinear.bias if bias else expected, atol=1e-5)
    grad = torch.randn_like(y)
    exact = bilinear(x1, x2)
    pairs = [torch.autograd.grad(out, (x1, layer.weight), grad) for out, layer in ((exact, bilinear), (y, own))]
    assert sqnr_db(exact.detach(), y.detach()) > 20
    assert min(sqnr_db(one, other) for one, other in zip(*pairs, strict=True)) > 20


def test_it_keeps_its_keys_and_is_restored_and_is_no_experts():
    x1, x2 = tensors()
    model = nn.ModuleDict({"pair": nn.Bilinear(12, 10, 5), "gate": nn.Linear(8, 5)})
    before, keys = model["pair"](x1, x2), list(model.state_dict())
    report = octavo.convert(model, "delayed")
    assert report.converted == ("gate",)
    assert list(model.state_dict()) == keys
    model["pair"](x1, x2).sum().backward()
    with octavo.autocast(enabled=False):
        assert torch.equal(model["pair"](x1, x2), before)
    assert left_as_they_are(model)
    assert (routers(model), unfuse_experts(model)) == ({}, {})
    octavo.restore(model)
    assert type(model["pair"]) is nn.Bilinear
    assert torch.equal(model["pair"](x1, x2), before)
