"""Experts in one layer against a layer for each of them: the same codes, scales, histories, outputs and gradients."""

import math
from itertools import pairwise

import pytest
import torch

import octavo
from octavo import recipes
from octavo.errors import CheckpointError, ConfigError
from octavo.formats import E4M3
from octavo.functional import fp8_grouped_linear, fp8_linear
from octavo.functional.saved_operands import quantize_operand
from octavo.kernels import EachRecord, cast_each, each
from octavo.nn import GroupedLinear
from octavo.numerics import CastSpec, Granularity, PerBlock, PerRow, PerTensor, reference
from octavo.numerics.scaling import amax, encode_scale_from_amax

EXPERTS, K, N = 4, 200, 150
SPLITS = ([0, 5, 5, 6, 40], [0, 0, 0, 0, 40], [0, 3, 9, 20, 33], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0])  # of 40 rows
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "bf16")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_split = pytest.mark.parametrize("split", SPLITS, ids=str)


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((40, K), (EXPERTS, N, K), (EXPERTS, N))
    return *(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes), torch.randn(40, N, dtype=dtype)


def results(y: torch.Tensor, grad: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@each_recipe
@each_split
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_outputs_and_gradients_are_those_of_a_layer_for_each_expert(recipe, split, dtype):
    recipe = recipes.get(recipe)
    x, weight, bias, grad = tensors(dtype)
    y = fp8_grouped_linear(x, weight, bias, torch.tensor(split), recipe)
    beyond = x.new_zeros(40 - split[-1], N)
    parts = [fp8_linear(x[s:e], weight[i], bias[i], recipe) for i, (s, e) in enumerate(pairwise(split)) if s < e]
    expected = results(torch.cat([*parts, beyond + 0 * (x.sum() + weight.sum() + bias.sum())]), grad, x, weight, bias)
    assert_equal(results(y, grad, x, weight, bias), expected)


@each_recipe
def test_one_by_one_the_numbers_are_the_same(recipe, monkeypatch):
    recipe, (x, weight, bias, grad) = recipes.get(recipe), tensors(torch.bfloat16)
    together = results(fp8_grouped_linear(x, weight, bias, torch.tensor(SPLITS[0]), recipe), grad, x, weight, bias)
    monkeypatch.setattr(each, "backend_of_cast", lambda *_: "none that takes several")
    monkeypatch.setattr(each, "select_product", lambda *_, **__: ("none that takes several", None))
    one_by_one = results(fp8_grouped_linear(x, weight, bias, torch.tensor(SPLITS[0]), recipe), grad, x, weight, bias)
    assert_equal(together, one_by_one)


@each_recipe
def test_a_transposed_weight_and_an_expanded_gradient_change_nothing(recipe):
    recipe, offsets = recipes.get(recipe), torch.tensor(SPLITS[0])
    x, weight, _, _ = tensors(torch.bfloat16)
    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_()
    grad = torch.ones(1, 1, dtype=torch.bfloat16).expand(40, N)
    y = fp8_grouped_linear(x, weight, None, offsets, recipe)
    other = fp8_grouped_linear(x, stored.transpose(1, 2), None, offsets, recipe)
    first, second = results(y, grad.contiguous(), x, weight), results(other, grad, x, stored)
    assert_equal(first, [*second[:2], second[2].transpose(1, 2)])


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_and_scales_are_those_of_the_reference(granularity: Granularity, transposed):
    spec = CastSpec(format=E4M3, granularity=granularity)
    torch.manual_seed(0)
    matrices = list(torch.randn(12, 70).split([1, 8, 3]))
    matrices[1][2, 3] = float("nan")
    for matrix, operand in zip(matrices, cast_each(matrices, spec, transposed=transposed)[0], strict=True):
        whole = matrix.t() if transposed else matrix
        expected = quantize_operand(whole.contiguous(), spec)
        assert torch.equal(operand.scale, expected.scale)
        assert torch.equal(operand.data.view(torch.uint8) & 0x7F, expected.data.view(torch.uint8) & 0x7F)
        encode_scale = encode_scale_from_amax(amax(whole, granularity), E4M3)
        scaled = (whole * granularity.expand(encode_scale, whole.shape)).flatten().tolist()
        codes = operand.data.view(torch.uint8).flatten().tolist()
        finite = [(value, code) for value, code in zip(scaled, codes, strict=True) if math.isfinite(value)]
        assert [code for _, code in finite] == [reference.encode(value, E4M3) for value, _ in finite]


@pytest.mark.parametrize("together", [True, False])
def test_an_expert_without_rows_keeps_its_history(together, monkeypatch):
    if not together:
        monkeypatch.setattr(each, "backend_of_cast", lambda *_: "none that takes several")
    layer = GroupedLinear(EXPERTS, K, N, recipe="delayed", manual_scale_updates=True)
    alone = [octavo.nn.Linear(K, N, bias=False, recipe="delayed", manual_scale_updates=True) for _ in range(EXPERTS)]
    for expert, one in enumerate(alone):
        one.weight.data.copy_(layer.weight[expert])
    torch.manual_seed(1)
    for split in ([0, 9, 20, 30, 40], [0, 0, 13, 13, 40], [0, 40, 40, 40, 40], [0, 1, 2, 3, 40]):
        x, grad = torch.randn(40, K, requires_grad=True), torch.randn(40, N)
        apart = x.detach().clone().requires_grad_()
        with torch.no_grad():  # so that a delayed scale is not that of the weight itself
            for weight in (layer.weight, *(one.weight for one in alone)):
                weight.mul_(1.7)
        layer.zero_grad()
        y = layer(x, torch.tensor(split))
        y.backward(grad)
        assert layer.weight.grad is not None
        for expert, (one, (start, end)) in enumerate(zip(alone, pairwise(split), strict=True)):
            one.zero_grad()
            if start == end:
                assert not layer.weight.grad[expert].any()
                continue
            part = one(apart[start:end])
            part.backward(grad[start:end])
            assert one.weight.grad is not None
            assert torch.equal(y[start:end], part)
            assert torch.equal(layer.weight.grad[expert], one.weight.grad)
        assert x.grad is not None
        assert apart.grad is not None
        assert torch.equal(x.grad, apart.grad)
        octavo.update_scales(layer)
        for one in alone:
            octavo.update_scales(one)
        state = octavo.scaling_state(layer)
        for expert, one in enumerate(alone):
            for key, value in octavo.scaling_state(one).items():
                assert torch.equal(state[key][expert], value), (split, expert, key)


def test_scaling_state_resumes_bit_for_bit_and_another_number_of_experts_is_refused():
    torch.manual_seed(0)
    layer, other = (GroupedLinear(EXPERTS, K, N, recipe="delayed") for _ in range(2))
    other.load_state_dict(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    offsets = torch.tensor(SPLITS[0])
    for scale in (3.0, 1.0):
        layer(scale * torch.randn(40, K), offsets).sum().backward()
        optimizer.step()
    state = octavo.scaling_state(layer)
    assert state["input.amax_history"].shape == (EXPERTS, 16)
    assert state["input.steps"].tolist() == [2, 0, 2, 2]
    octavo.load_scaling_state(other, state)
    x = torch.randn(40, K)
    assert torch.equal(layer(x, offsets), other(x, offsets))
    with pytest.raises(CheckpointError, match="shape"):
        octavo.load_scaling_state(GroupedLinear(2, K, N, recipe="delayed"), state)


def test_static_scales_are_one_for_each_expert_and_only_those_with_rows_need_one():
    layer = GroupedLinear(EXPERTS, K, N, recipe="static")
    with torch.no_grad():
        layer.input_scale.copy_(torch.tensor([0.5, 0.0, 0.25, 0.125]))
        x = torch.randn(40, K)
        y = layer(x, torch.tensor(SPLITS[0]))
        one = octavo.nn.Linear(K, N, bias=False, recipe="static")
        one.weight.copy_(layer.weight[3])
        one.input_scale.fill_(0.125)
        assert torch.equal(y[6:], one(x[6:]))
        with pytest.raises(ConfigError, match="scale"):
            layer(x, torch.tensor([0, 1, 2, 3, 40]))


def test_no_gradient_is_computed_for_frozen_experts_and_no_amax_recorded():
    layer = GroupedLinear(EXPERTS, K, N, recipe="delayed", manual_scale_updates=True).requires_grad_(False)
    x = torch.randn(40, K, requires_grad=True)
    layer(x, torch.tensor(SPLITS[2])).sum().backward()
    assert x.grad is not None
    assert not x.grad[33:].any()
    octavo.update_scales(layer)
    state = octavo.scaling_state(layer)
    assert state["input.steps"].tolist() == [1] * EXPERTS
    assert state["weight.steps"].tolist() == [0] * EXPERTS


def test_checkpointing_records_and_counts_once():
    layer, offsets = GroupedLinear(EXPERTS, K, N, recipe="delayed", manual_scale_updates=True), torch.tensor(SPLITS[2])
    x = torch.randn(40, K, requires_grad=True)
    with torch.no_grad():
        x[0, 0] = layer.weight[0, 0, :2] = float("nan")
    y = torch.utils.checkpoint.checkpoint(layer, x, offsets, use_reentrant=False)
    y.nansum().backward()
    counts = octavo.nonfinite_counts(layer)
    assert (counts["input"], counts["weight"]) == (1, 2)
    assert layer.amax_history is not None
    assert layer.amax_history.overflowed[0].tolist() == [True, False, False, False]


def test_each_matrix_is_measured_into_its_own_place():
    largest, marks, count = torch.full((5,), -1.0), torch.zeros(5, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    record = EachRecord((4, 1), largest, marks, count)
    cast_each([torch.tensor([[2.0, -3.0]]), torch.tensor([[float("inf"), 1.0]])], CastSpec(format=E4M3), record=record)
    assert largest.tolist() == [-1, 1, -1, -1, 3]
    assert marks.tolist() == [False, True, False, False, False]
    assert count == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("factors", [(4.0, 1.0), (1.0, 4.0)], ids=str)
def test_the_largest_of_several_micro_batches_is_recorded(factors, together, monkeypatch):
    if not together:
        monkeypatch.setattr(each, "backend_of_cast", lambda *_: "none that takes several")
    layer = GroupedLinear(EXPERTS, K, N, recipe="delayed", manual_scale_updates=True)
    batches = [factor * torch.randn(40, K).clamp(-3, 3) for factor in factors]
    for batch in batches:
        layer(batch, torch.tensor(SPLITS[0])).sum().backward()
    octavo.update_scales(layer)
    largest = torch.stack(batches).abs().amax(dim=(0, 2))
    expected = [largest[start:end].amax() if start < end else -1.0 for start, end in pairwise(SPLITS[0])]
    assert octavo.scaling_state(layer)["input.amax_history"].amax(dim=1).tolist() == [float(e) for e in expected]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 5, 5, 6, 40], r"^offsets must be a tensor, not a list; pass torch\.tensor\(offsets\)$"),
        (
            torch.zeros(5, dtype=torch.int64, device="meta"),
            "^offsets are on the meta device, which has no values; pass",
        ),
    ],
    ids=["list", "meta"],
)
def test_offsets_without_values_to_read_are_refused_in_a_sentence(offsets, words):
    with pytest.raises(ConfigError, match=words):
        GroupedLinear(EXPERTS, K, N)(torch.zeros(40, K), offsets)


@pytest.mark.parametrize("sizes", [(-1, K, N), (0, K, N), (EXPERTS, 0, N), (EXPERTS, K, 1.5)], ids=str)
def test_sizes_below_one_are_refused_in_a_sentence(sizes):
    with pytest.raises(ConfigError, match=r"^(experts|in_features|out_features) must be "):
        GroupedLinear(*sizes)


@pytest.mark.parametrize(
    "offsets", [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1, 3, 40]), torch.tensor([0, 1, 2, 3, 41]), torch.zeros(5)]
)
def test_wrong_offsets_are_refused(offsets):
    with pytest.raises(ConfigError, match="offsets"):
        GroupedLinear(EXPERTS, K, N)(torch.zeros(40, K), offsets)
