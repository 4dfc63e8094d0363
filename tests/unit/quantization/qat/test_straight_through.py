"""The layer that quantization-aware training differentiates, against plain operations of torch."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import octavo
from octavo import recipes
from octavo.formats import E4M3
from octavo.functional import fp8_linear
from octavo.numerics.cast import cast_nearest
from octavo.quantization.qat.straight_through import straight_through_linear
from octavo.recipes import CastSpec, GemmSpec, Recipe, Scaling
from octavo.scaling import LayerScaling

DYNAMIC = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")
NAMES = ("static", "weight_only", *DYNAMIC)
SHAPES = [(1, 1, 1), (3, 5, 2), (7, 130, 33), (16, 128, 256)]


def tensors(M: int, K: int, N: int, *, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(M, K, generator=generator) * 3).to(dtype).requires_grad_()
    weight = torch.randn(N, K, generator=generator).requires_grad_()
    bias = torch.randn(N, generator=generator).requires_grad_()
    return x, weight, bias, torch.randn(M, N, generator=generator).to(dtype)


def tap_for(recipe: Recipe, scale: float) -> LayerScaling:
    return LayerScaling(input_scale=torch.tensor(scale) if recipe.has_static_input else None)


def decoded(x: Tensor, spec: CastSpec | None, scale: float) -> Tensor:
    """What FP8 keeps of a matrix, float64."""
    if spec is None:
        return x.detach().double()
    if spec.scaling == Scaling.STATIC:
        q = octavo.quantize(x.detach(), spec.format, scale=torch.tensor(scale))
    else:
        q = octavo.quantize(
            x.detach(),
            spec.format,
            granularity=spec.granularity,
            scale_rounding=spec.scale_rounding,
            scale_format=spec.scale_format,
            amax_floor=spec.amax_floor,
        )
    return q.data.double() * q.granularity.expand(q.fp32_scale, q.shape).double()


def through(x: Tensor, value: Tensor, passes: Tensor) -> Tensor:
    """``value``, whose derivative by ``x`` is 1 where it ``passes`` and 0 elsewhere, by torch's own autograd."""
    kept = x.double() * passes
    return kept + (value - kept).detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_forward_is_that_of_the_converted_layer_to_the_bit(name, shape, dtype):
    recipe = recipes.get(name)
    x, weight, bias, _ = tensors(*shape, dtype=dtype)
    y = straight_through_linear(x, weight, bias, recipe, scaling=tap_for(recipe, 0.01))
    with torch.no_grad():
        wanted = fp8_linear(x, weight, bias, recipe, scaling=tap_for(recipe, 0.01))
    assert y.dtype is dtype
    assert torch.equal(y.detach(), wanted)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(NAMES),
    st.tuples(st.integers(0, 20), st.integers(1, 150), st.integers(1, 40)),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_gradients_are_those_of_torchs_operations(name, shape, clip, seed):
    """In exact arithmetic the same; in FP32 within rounding of sums of as many products."""
    recipe, scale = recipes.get(name), 0.008  # clips |x| above 3.7, of a deviation of 3
    x, weight, bias, g = tensors(*shape, seed=seed)
    y = straight_through_linear(x, weight, bias, recipe, scaling=tap_for(recipe, scale), clip_gradients=clip)
    y.backward(g)
    limit = 464 * scale if recipe.has_static_input and clip else math.inf
    x_q, weight_q = decoded(x, recipe.output.a, scale), decoded(weight, recipe.output.b, scale)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    passes = x.detach().double().abs() <= limit
    slow = F.linear(
        through(leaves[0], x_q, passes), through(leaves[1], weight_q, torch.ones_like(weight_q)), leaves[2].double()
    )
    slow.backward(g.double())
    torch.testing.assert_close(y.double(), slow, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip((x, weight, bias), leaves, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    if clip and recipe.has_static_input:
        assert (x.grad[~passes] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_bf16_are_those_of_fp32_rounded(name):
    """Codes decode exactly or to BF16, products are summed in FP32: each gradient within BF16's step of its scale."""
    recipe = recipes.get(name)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias, g = tensors(16, 130, 33, dtype=torch.bfloat16)
        wide = x.detach().to(dtype).requires_grad_()
        straight_through_linear(wide, weight, bias, recipe, scaling=tap_for(recipe, 0.01)).backward(g.to(dtype))
        assert wide.grad is not None
        assert wide.grad.dtype is dtype
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float32
        found.append((wide.grad.float(), weight.grad, bias.grad))
    for exact, narrow in zip(*found, strict=True):
        assert (exact - narrow).abs().max() <= 2**-7 * exact.abs().max()


def test_elements_that_round_to_the_largest_value_keep_their_gradient():
    recipe = recipes.get("static")
    x = torch.tensor([[448.0, 449.0, 464.0, 464.1, -464.0, -465.0, torch.inf]], requires_grad=True)
    weight = torch.ones(1, 7)
    y = straight_through_linear(x, weight, None, recipe, scaling=tap_for(recipe, 1.0), clip_gradients=True)
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).tolist() == [[True, True, True, False, True, False, False]]


def test_a_weight_whose_scale_is_rounded_down_is_clipped_too():
    """``floor`` lets amaxes saturate; the gradient of those weights is zero, and only with ``clip_gradients``."""
    floor = CastSpec(format=E4M3, scale_rounding=octavo.numerics.ScaleRounding.FLOOR)
    recipe = replace(recipes.get("tensorwise"), name="floor", output=GemmSpec(a=floor, b=floor))
    for clip in (False, True):
        weight = torch.tensor([[500.0, 1.0]], requires_grad=True)  # its scale is 1
        y = straight_through_linear(torch.ones(1, 2), weight, None, recipe, clip_gradients=clip)
        y.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[0.0 if clip else 1.0, 1.0]]


def surrogate(x: Tensor, log2_scale: Tensor) -> Tensor:
    """s · q(x / s) straight through, FP64 but for the rounding itself."""
    scale = log2_scale.double().exp2()
    v = x.double() / scale
    q = cast_nearest(v.detach().float(), E4M3, torch.ones(v.shape)).double()
    return scale * through(v, q, v.abs() <= 464)


@pytest.mark.parametrize("scale", [0.001, 0.0101, 0.1, 3.0], ids=["most is clipped", "some is", "none is", "coarse"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_a_learned_scale_is_autograds(scale, shape):
    recipe = recipes.get("static")
    x, weight, bias, g = tensors(*shape)
    log2_scale = torch.tensor(scale).log2().requires_grad_()
    used = log2_scale.detach().exp2()
    tap = LayerScaling(input_scale=used)
    straight_through_linear(x, weight, bias, recipe, scaling=tap, log2_scale=log2_scale).backward(g)
    assert recipe.output.b is not None
    weight_q = decoded(weight, recipe.output.b, scale)
    free = log2_scale.detach().clone().requires_grad_()
    F.linear(surrogate(x.detach(), free), weight_q, bias.detach().double()).backward(g.double())
    assert free.grad is not None
    assert log2_scale.grad is not None
    normalised = free.grad.item() / math.sqrt(shape[1] * 448)
    assert log2_scale.grad.item() == pytest.approx(normalised, rel=1e-3, abs=1e-5)


def test_the_gradient_of_a_learned_scale_is_the_formula_element_by_element():
    """Four values: exact, rounded, subnormal, clipped; no sum to hide in."""
    recipe, s = recipes.get("static"), 0.5
    for value, kept in ((2.0, 2.0), (1.05, 1.0), (2.0**-11, 0.0), (300.0, 224.0)):
        log2_scale = torch.tensor(math.log2(s), requires_grad=True)
        tap = LayerScaling(input_scale=torch.tensor(s))
        weight = torch.tensor([[2.0]])
        y = straight_through_linear(torch.tensor([[value]]), weight, None, recipe, scaling=tap, log2_scale=log2_scale)
        y.backward(torch.ones(1, 1))
        clipped = value > 464 * s
        by_scale = kept / s - (0.0 if clipped else value / s)  # q(v) − v · [not clipped]
        assert y.item() == pytest.approx(2 * kept, rel=1e-6)  # the weight has a scale too
        assert log2_scale.grad is not None
        assert log2_scale.grad.item() == pytest.approx(2 * by_scale * s * math.log(2) / math.sqrt(448), rel=1e-6)


def test_the_gradient_of_a_learned_scale_is_the_slope_of_the_smooth_surrogate():
    """Where everything is clipped, s · q(x / s) is ± s · 448: no staircase, and finite differences are exact."""
    recipe, x, weight = recipes.get("static"), torch.full((4, 3), 100.0), torch.tensor([[1.0, 2.0, -4.0]])

    def output(log2: float) -> float:
        tap = LayerScaling(input_scale=torch.tensor(log2).exp2())
        return straight_through_linear(x, weight, None, recipe, scaling=tap).double().sum().item()

    at, step = -6.0, 1 / 64
    log2_scale = torch.tensor(at, requires_grad=True)
    tap = LayerScaling(input_scale=log2_scale.detach().exp2())
    straight_through_linear(x, weight, None, recipe, scaling=tap, log2_scale=log2_scale).sum().backward()
    slope = (output(at + step) - output(at - step)) / (2 * step)
    assert log2_scale.grad is not None
    assert log2_scale.grad.item() * math.sqrt(3 * 448) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("start", [-12.0, 8.0], ids=["clips nearly all", "flushes nearly all"])
def test_descending_by_it_finds_a_better_scale(start):
    """The true error of the rounded tensor falls by nine tenths, from both sides."""
    recipe, x = recipes.get("static"), torch.randn(64, 16)
    eye = torch.eye(16)
    log2_scale = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([log2_scale], lr=0.1)
    errors = []
    for _ in range(150):
        tap = LayerScaling(input_scale=log2_scale.detach().exp2())
        loss = (straight_through_linear(x, eye, None, recipe, scaling=tap, log2_scale=log2_scale) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < 0.1 * errors[0]


def kept_dtypes(call) -> list[torch.dtype]:
    """The dtypes of all matrices that backward keeps."""
    kept: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return kept


def test_backward_keeps_codes_and_nothing_wider():
    recipe, codes = recipes.get("static"), torch.float8_e4m3fn
    x, weight, bias, _ = tensors(8, 16, 4)
    tap = tap_for(recipe, 0.01)
    frozen = weight.detach()
    log2_scale = torch.zeros((), requires_grad=True)
    cases = [
        ({}, weight, [codes, codes]),
        ({}, frozen, [codes]),
        ({"clip_gradients": True}, weight, [codes, codes, torch.bool]),
        ({"log2_scale": log2_scale}, weight, [codes, codes, torch.float32]),
    ]
    for options, by, wanted in cases:
        found = kept_dtypes(lambda o=options, w=by: straight_through_linear(x, w, bias, recipe, scaling=tap, **o))
        assert found == wanted
    with torch.no_grad():
        assert kept_dtypes(lambda: straight_through_linear(x, weight, bias, recipe, scaling=tap)) == []


def test_nan_shows_in_its_own_rows_and_in_the_gradient():
    x = torch.tensor([[1.0, 2.0], [torch.nan, 1.0]])
    weight = torch.ones(3, 2, requires_grad=True)
    y = straight_through_linear(x, weight, None, recipes.get("tensorwise"))
    assert y.isnan().all(dim=1).tolist() == [False, True]
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isnan().any()
