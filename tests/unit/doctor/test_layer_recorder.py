"""What one layer's calls leave behind: every operand beside its own tensor, every GEMM beside its own product."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
import octavo.doctor
from octavo.doctor.layer_recorder import COLUMNS, ROWS, LayerRecorder
from octavo.doctor.series import OPERANDS, CastKey, ProductKey
from octavo.doctor.statistics import CAST_FIELDS, cast_numbers, product_numbers, spread
from octavo.functional import cast_operand
from octavo.nn.fp8_weight import store_weight_as_codes
from octavo.nn.fused import _unsupported_layer_reasons
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec
from tests.unit.doctor.cast_oracle import numbers_of, scales_of, values_of

M, K, N = 40, 96, 24
FP8 = [name for name in octavo.recipes.names() if octavo.recipes.get(name).output.a is not None]
TRAINED = [name for name in FP8 if not octavo.recipes.get(name).has_static_input]


def watched(layer):
    layer.watch = LayerRecorder("there", {}, {})
    return layer.watch


def call(recipe, *, bias=False, dtype=torch.float32, x_learns=True):
    """A layer, its recorder after one forward and backward, and the tensors x, weight and grad_output."""
    layer = octavo.nn.Linear(K, N, bias=bias, recipe=recipe)
    recorder, x = watched(layer), (torch.randn(M, K) * torch.randn(K).exp()).to(dtype).requires_grad_(x_learns)
    grad_output = (torch.randn(M, N) * 1e-3).to(dtype)
    y = layer(x)
    y.backward(grad_output)
    return layer, recorder, {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": grad_output}


def floored(name, floor):
    """A recipe with another amax_floor in every cast."""
    recipe = octavo.recipes.get(name)
    products = {gemm: getattr(recipe, gemm) for gemm in OPERANDS}
    changed = {
        gemm: replace(one, a=replace(one.a, amax_floor=floor), b=replace(one.b, amax_floor=floor))
        for gemm, one in products.items()
        if one.a is not None
    }
    return replace(recipe, **changed)


def numbers(table, of):
    return {tuple(key)[1:]: of(tensor.double().numpy()) for key, tensor in table.items()}


def wanted_operands(recipe):
    """By (role, gemm), the operand's specification and whether it is of the transpose, without repetitions."""
    pairs = {
        ("input", "output"): (recipe.output.a, False),
        ("input", "grad_weight"): (recipe.grad_weight.b, True),
        ("weight", "output"): (recipe.output.b, False),
        ("weight", "grad_input"): (recipe.grad_input.b, True),
        ("grad_output", "grad_input"): (recipe.grad_input.a, False),
        ("grad_output", "grad_weight"): (recipe.grad_weight.a, True),
    }
    first: dict[tuple[str, str], tuple[CastSpec, bool]] = {}
    for (role, gemm), (spec, turned) in pairs.items():
        known = [s for (r, _), (s, _) in first.items() if r == role]
        repeated = spec in known and spec is not None and spec.granularity.orientation_free
        if spec is not None and not repeated:
            first[role, gemm] = (spec, turned)
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*TRAINED, "floored"])
def test_every_cast_of_a_call_once(name, dtype):
    recipe = floored("blockwise", 0.02) if name == "floored" else octavo.recipes.get(name)
    _, recorder, tensors = call(recipe, dtype=dtype)
    found, wanted = numbers(recorder.casts, cast_numbers), wanted_operands(recipe)
    assert found.keys() == wanted.keys()
    for (role, gemm), (spec, turned) in wanted.items():
        x = tensors[role].t() if turned else tensors[role]
        made = cast_operand(x, spec)  # without a history a delayed cast is a dynamic one
        assert isinstance(made, QuantizedTensor)
        oracle = numbers_of(x, made, (slice(None), slice(None)), floor=spec.amax_floor)
        for field, value in zip(CAST_FIELDS, found[role, gemm], strict=True):
            assert value == pytest.approx(oracle[field], rel=1e-6, nan_ok=True), (role, gemm, field)


def test_a_recipe_s_own_floor_makes_no_scale_inexact():
    """Of tensors below it, and of some scaling groups of others."""
    for name in ("tensorwise", "rowwise", "blockwise"):
        model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
        octavo.convert(model, floored(name, 1e-3), convert_head=True)
        watcher = octavo.doctor.watch(model, interval=1)
        for step in range(1, 8):
            x = torch.randn(M, K) * 10.0 ** torch.linspace(-8, 1, M)[:, None]
            with watcher.step():
                (model(x.requires_grad_()) * torch.randn(M, N) * 1e-6 * step).sum().backward()
        assert not {one.code for one in watcher.findings()} & {"inexact-amax", "frozen-scale"}


def decoded(made):
    codes = made.data.contiguous().view(torch.uint8).numpy()
    return values_of(made.data.dtype)[codes] * scales_of(made).astype(np.float64)


@pytest.mark.parametrize("name", TRAINED)
def test_every_gemm_of_a_call(name):
    recipe = octavo.recipes.get(name)
    _, recorder, tensors = call(recipe)
    found = numbers(recorder.products, product_numbers)
    x, weight, grad_output = tensors["input"], tensors["weight"], tensors["grad_output"]
    operands = {
        "output": (recipe.output, x, weight),
        "grad_input": (recipe.grad_input, grad_output, weight.t()),
        "grad_weight": (recipe.grad_weight, grad_output.t(), x.t()),
    }
    assert found.keys() == {(gemm,) for gemm, (spec, *_) in operands.items() if spec.a is not None}
    for (gemm,), (sqnr_db, bias) in found.items():
        spec, left, right = operands[gemm]
        rows, columns = spread(left.shape[0], ROWS), spread(right.shape[0], COLUMNS)
        exact = left.double().numpy()[rows] @ right.double().numpy()[columns].T
        made = [decoded(cast_operand(side, cast)) for side, cast in ((left, spec.a), (right, spec.b))]
        cast = made[0][rows] @ made[1][columns].T
        assert sqnr_db == pytest.approx(10 * np.log10((exact**2).sum() / ((cast - exact) ** 2).sum()), abs=0.02), gemm
        assert np.isnan(bias) or abs(bias) < 1e-3


def test_stored_codes_have_no_weight_cast_and_no_gemm_measurement():
    layer = octavo.nn.Linear(K, N, bias=False)
    layer.weight.requires_grad_(False)
    store_weight_as_codes(layer)
    recorder = watched(layer)
    layer(torch.randn(M, K, requires_grad=True)).sum().backward()
    assert {key[1:] for key in recorder.casts} == {("input", "output"), ("grad_output", "grad_input")}
    assert not recorder.products


@pytest.mark.parametrize("name", TRAINED)
def test_recorder_has_no_entry_for_gemms_that_do_not_run(name):
    frozen = octavo.nn.Linear(K, N, recipe=name)
    frozen.weight.requires_grad_(False)
    recorder = watched(frozen)
    frozen(torch.randn(M, K, requires_grad=True)).sum().backward()
    assert {key.gemm for key in recorder.products} == {"output", "grad_input"}
    assert not any(key.gemm == "grad_weight" for key in recorder.casts)
    _, recorder, _ = call(name, x_learns=False)
    assert ProductKey("there", "grad_input") not in recorder.products
    with torch.no_grad():
        alone = watched(frozen)
        frozen(torch.randn(M, K))
    assert {key.gemm for key in alone.casts} == {"output"}


def test_an_empty_batch_leaves_nothing():
    layer = octavo.nn.Linear(K, N)
    recorder = watched(layer)
    layer(torch.randn(0, K, requires_grad=True)).sum().backward()
    assert {key.role for key in recorder.casts} == {"weight"}
    assert not recorder.products


def test_the_last_of_several_calls_counts_or_the_first_that_broke():
    layer = octavo.nn.Linear(K, N, bias=False)
    recorder, key = watched(layer), CastKey("there", "input", "output")
    amax = CAST_FIELDS.index("amax")
    for factor, wanted in ((1.0, 1.0), (5.0, 5.0), (2.0, 2.0)):
        layer(torch.full((4, K), factor))
        assert cast_numbers(recorder.casts[key].numpy())[amax] == wanted
    broken = torch.full((4, K), 7.0)
    broken[1, 2] = torch.nan
    for x in (broken, broken * 3, torch.ones(4, K)):
        layer(x)
        found = cast_numbers(recorder.casts[key].numpy())
        assert (found[amax], found[CAST_FIELDS.index("nonfinite")]) == (7.0, 1)


def grad_weight_sqnr(recorder):
    return product_numbers(recorder.products["there", "grad_weight"].numpy())[0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_layer_called_twice_is_compared_with_each_calls_own_input(order):
    layer = octavo.nn.Linear(K, N, bias=False)
    recorder = watched(layer)
    outputs = [layer(torch.randn(M, K)) for _ in range(2)]
    for index in order:
        recorder.products.clear()
        outputs[index].backward(torch.randn(M, N))
        assert 20 < grad_weight_sqnr(recorder) < 34


def test_a_checkpointed_call_is_measured_as_itself():
    layer = octavo.nn.Linear(K, N, bias=False)
    for reentrant in (False, True):
        recorder = watched(layer)
        x = torch.randn(M, K, requires_grad=True)
        (checkpoint(layer, x, use_reentrant=reentrant) * torch.randn(M, N)).sum().backward()
        assert 20 < grad_weight_sqnr(recorder) < 34
        assert len(recorder.casts) == 3


def test_tensors_that_were_replaced_on_the_way_are_compared_with_nothing_else():
    layer = octavo.nn.Linear(K, N, bias=False)
    recorder = watched(layer)
    originals: list[torch.Tensor] = []  # alive, so that no clone gets the address of one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        originals.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(M, K)).backward(torch.randn(M, N))
    assert ProductKey("there", "grad_weight") not in recorder.products
    assert CastKey("there", "grad_output", "grad_weight") in recorder.casts


def test_autocast_does_not_round_what_is_wanted():
    """Under autocast a product of float32 would be one of bfloat16: only codes may be compared with it."""
    layer = octavo.nn.Linear(K, N, bias=False)
    x = torch.randn(M, K).bfloat16()
    found = []
    for around in (False, True):
        recorder = watched(layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            layer(x)
        found.append(recorder.products["there", "output"])
    assert torch.equal(found[0][:3], found[1][:3])


def test_a_watched_layer_is_not_fused():
    """A fused layer's input is never written: there is nothing to compare its operands with."""
    layer, x = octavo.nn.Linear(K, N), torch.randn(M, K)
    assert list(_unsupported_layer_reasons(x, layer, None, 1)) == []
    watched(layer)
    assert "the doctor looks" in next(_unsupported_layer_reasons(x, layer, None, 1))


def test_a_static_scale_is_judged_like_any_other():
    layer = octavo.nn.Linear(K, N, recipe="static")
    layer.input_scale.fill_(1 / 448)
    layer.weight.requires_grad_(False)
    recorder = watched(layer)
    with torch.no_grad():
        layer(torch.full((4, K), 8.0))
    assert octavo.recipes.get("static").has_static_input
    found = dict(zip(CAST_FIELDS, cast_numbers(recorder.casts["there", "input", "output"].numpy()), strict=True))
    assert found["saturation_fraction"] == 1
    assert found["stale_ratio"] == pytest.approx(8)


def test_operands_in_high_precision_are_left_out():
    layer = octavo.nn.Linear(K, N, recipe="bf16")
    recorder = watched(layer)
    layer(torch.randn(M, K, requires_grad=True)).sum().backward()
    assert not recorder.casts
    assert not isinstance(cast_operand(torch.ones(2, 2), None), QuantizedTensor)
