"""A GPU's codes and scales are the CPU's, bit for bit, NaN's sign aside: every cast of every recipe, every dtype."""

import itertools
import math

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, FP8_FORMATS, FP32
from octavo.kernels import fake_quantize, quantize
from octavo.numerics import Nonfinite, PerBlock, PerRow, PerTensor, QuantizedTensor, amax, cast_stochastic, dequantize
from octavo.numerics.cast import STOCHASTIC_BITS
from octavo.recipes import CastSpec
from tests.contract.gemm_oracle import assert_same_operand
from tests.gpu import devices
from tests.gpu.devices import on_cpu

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((256, 384), (33, 300), (130, 18), (1, 4096), (4096, 1), (7, 0), (0, 16), (3, 5, 272))


def casts() -> dict[str, CastSpec]:
    """Every different cast of every recipe."""
    found = {}
    for name in octavo.recipes.names():
        recipe = octavo.recipes.get(name)
        for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight):
            for spec in (gemm.a, gemm.b):
                if spec is not None:
                    key = f"{spec.format} {spec.granularity} {spec.scale_rounding} {spec.scale_format}"
                    found[f"{key} {spec.amax_floor:g}"] = spec
    return found


CASTS = casts()
GRANULARITIES = (PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32))


def numbers(shape, dtype, *, broken=False):
    """Magnitudes over thirty binades, a row and a block of zeros, subnormals; and, where asked for, NaN and ±Inf."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-16, 13, shape).float())
    if x.numel():
        flat = x.view(-1)
        flat[:: max(1, flat.numel() // 7)] = 0.0
        flat[flat.numel() // 2] = 1e-40
        if broken:
            flat[0], flat[-1], flat[flat.numel() // 3] = float("nan"), float("inf"), float("-inf")
    if x.ndim == 2 and x.shape[0] > 2:
        x[2] = 0.0
    return x.to(dtype)


def cast(x, spec: CastSpec) -> QuantizedTensor:
    return quantize(
        x,
        spec.format,
        granularity=spec.granularity,
        scale_rounding=spec.scale_rounding,
        scale_format=spec.scale_format,
        amax_floor=spec.amax_floor,
        margin=spec.margin,
        nonfinite=spec.nonfinite,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_every_cast_of_every_recipe(name, dtype):
    for shape, broken in itertools.product(SHAPES, (False, True)):
        x = numbers(shape, dtype, broken=broken)
        held = x.to(devices.DEVICE)
        pairs = [(held, x)]
        if x.ndim == 2:
            pairs += [(held.t(), x.t()), (held[::2, 1:], x[::2, 1:])]
        for there, here in pairs:
            assert_same_operand(on_cpu(cast(there, CASTS[name])), cast(here, CASTS[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_given_amaxes_and_scales(granularity, fmt, dtype):
    x = numbers((130, 272), dtype)
    there = x.to(devices.DEVICE)
    most = amax(x, granularity) / 3  # so that something saturates
    found = quantize(there, fmt, granularity=granularity, amax=most.to(devices.DEVICE))
    assert_same_operand(on_cpu(found), quantize(x, fmt, granularity=granularity, amax=most))
    scale = quantize(x, fmt, granularity=granularity).scale * 1.5
    found = quantize(there, fmt, granularity=granularity, scale=scale.to(devices.DEVICE))
    assert_same_operand(on_cpu(found), quantize(x, fmt, granularity=granularity, scale=scale))


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
@pytest.mark.parametrize("nonfinite", list(Nonfinite))
def test_every_bfloat16(fmt, nonfinite):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    for scale in (1.0, 2.0**-3, 0.3):
        given = torch.tensor(scale)
        found = quantize(x.to(devices.DEVICE), fmt, scale=given.to(devices.DEVICE), nonfinite=nonfinite)
        assert_same_operand(on_cpu(found), quantize(x, fmt, scale=given, nonfinite=nonfinite))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_the_way_back(granularity, dtype):
    q = quantize(numbers((130, 272), dtype, broken=True), E4M3, granularity=granularity)
    there = QuantizedTensor(q.data.to(devices.DEVICE), q.scale.to(devices.DEVICE), granularity, dtype)
    torch.testing.assert_close(dequantize(there).cpu(), dequantize(q), rtol=0, atol=0, equal_nan=True)
    x = numbers((130, 272), dtype, broken=True)
    found, wanted = (fake_quantize(held, E4M3, granularity=granularity) for held in (x.to(devices.DEVICE), x))
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_stochastic_rounding_of_the_same_random_numbers(fmt):
    x = numbers((64, 300), FP32.torch_dtype).clamp(-fmt.max, fmt.max)
    x[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, math.copysign(math.nan, -1)])
    random = torch.randint(1 << STOCHASTIC_BITS, x.shape, dtype=torch.int32)
    rounded = torch.ops.octavo.round_stochastic
    found = rounded(x.to(devices.DEVICE), random.to(devices.DEVICE), fmt.torch_dtype)
    assert torch.equal(found.cpu().view(torch.uint8), rounded(x, random, fmt.torch_dtype).view(torch.uint8))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_stochastic_rounding_with_a_seed(fmt):
    """A generator of the same seed gives the same codes wherever the tensor is."""
    x = numbers((64, 300), FP32.torch_dtype)
    here, there = (
        cast_stochastic(x.to(device), fmt, generator=torch.Generator().manual_seed(3)).cpu()
        for device in (torch.device("cpu"), devices.DEVICE)
    )
    assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


def test_a_graph_takes_no_seed_of_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="generator of the tensor's device"):
        cast_stochastic(numbers((64, 300), FP32.torch_dtype).to(devices.DEVICE), E4M3)
