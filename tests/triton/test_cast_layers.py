"""Linear layers with the casts of a GPU: the same codes, scales and recorded state as on a CPU."""

import pytest
import torch
from torch import Tensor

import octavo
from octavo.functional import fp8_linear
from octavo.kernels import dispatch, triton_bindings
from octavo.nn import Linear
from octavo.numerics import AmaxRecord
from tests.contract.gemm_oracle import recorded_products
from tests.recorded_state import recorded_state
from tests.triton.test_casts import assert_codes


@pytest.fixture
def as_on_a_gpu(monkeypatch, device):
    """The routes of a GPU, for CPU tensors in Triton's interpreter."""
    if device.type == "cuda":
        return
    here = triton_bindings.unsupported_reason
    monkeypatch.setattr(triton_bindings, "unsupported_reason", lambda problem: here(problem._replace(device="cuda")))
    monkeypatch.setattr(dispatch, "_cast_choices", {})  # selections of the routes of a CPU


RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")


def _step(name: str, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = fp8_linear(leaves[0], leaves[1], None, octavo.recipes.get(name))
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_layer_computes_the_same_and_keeps_a_byte_an_element(name, device, request):
    x, weight, grad = (torch.randn(shape, device=device) for shape in ((48, 32), (16, 32), (48, 16)))
    with recorded_products() as wanted:
        _step(name, x.cpu(), weight.cpu(), grad.cpu())
    request.getfixturevalue("as_on_a_gpu")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with recorded_products() as found, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _step(name, x, weight, grad)
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in ((one.a, other.a), (one.b, other.b)):
            assert_codes(mine.data, theirs.data)
            assert torch.equal(mine.scale.cpu(), theirs.scale)
    codes = [t for t in kept if t.dtype is torch.float8_e4m3fn]
    assert all(t.is_contiguous() for t in codes)
    recipe = octavo.recipes.get(name)
    of_input = 0 if recipe.grad_weight.b is None else x.numel()  # rowwise_hp_grad_weight keeps x itself
    spec = recipe.output.b
    one_cast = spec is not None and spec == recipe.grad_input.b and spec.granularity.orientation_free
    of_weight = weight.numel() if one_cast and not weight.is_cuda else 0  # elsewhere backward casts it again
    assert sum(t.numel() for t in codes) == of_weight + of_input


STEPS = (1.0, 3.0, float("inf"), 2.0)  # what multiplies the largest element of the input in each


def _train(name: str, x: Tensor, weight: Tensor) -> Linear:
    layer = Linear(32, 16, bias=False, recipe=name, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    for factor in STEPS:
        for rows in x.chunk(2):  # two micro-batches
            given = rows.clone()
            given[0, 0] *= factor
            layer(given.requires_grad_()).square().sum().backward()
        octavo.update_scales(layer)
    return layer


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy's, of infinite elements
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_that_was_trained_remembers_the_same_without_operations_of_its_own(name, device, request, monkeypatch):
    x, weight = torch.randn(32, 32, device=device), torch.randn(16, 32, device=device)
    with monkeypatch.context() as plain:
        plain.setattr(triton_bindings, "supports", lambda *_, **__: False)
        wanted = _train(name, x, weight)
    request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(AmaxRecord, "add", None)
    found = _train(name, x, weight)
    states = [recorded_state(layer) for layer in (found, wanted)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert wanted.nonfinite_counts.sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 33])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_it_is_one_graph_and_computes_the_same(name, rows):
    x, weight, grad = (torch.randn(shape, device="cuda") for shape in ((rows, 256), (128, 256), (rows, 128)))
    recipe = octavo.recipes.get(name)  # torch 2.11 compiles no making of one
    step = torch.compile(lambda x, weight: fp8_linear(x, weight, None, recipe), fullgraph=True)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = step(*leaves)
    compiled = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    torch.testing.assert_close(compiled, _step(name, x, weight, grad), rtol=1e-5, atol=1e-5)
