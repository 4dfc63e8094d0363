"""``cast_nearest`` at every 16-bit input and at every float32 input where a rounding can go wrong, bit for bit."""

import numpy as np
import pytest
import torch

from octavo.formats import BF16, E4M3, E5M2, FP8_FORMATS, FP16, FP32, Format
from octavo.numerics import Nonfinite, Overflow, cast_nearest
from octavo.numerics.reference import decode, encode
from tests.oracle.rounding_table import all_16_bit, assert_same_codes, expected_codes, float32_edges

POLICIES = [{"overflow": overflow, "nonfinite": nonfinite} for overflow in Overflow for nonfinite in Nonfinite]
ENCODE_SCALES = [
    1.0,
    448 / 3.7,
    2.0**-20,
    1 / 3,
    1e30,  # most products overflow float32
    float(np.finfo(np.float32).max),
    float(np.finfo(np.float32).tiny),
    1e-41,  # subnormal
]

every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p['overflow']}-{p['nonfinite']}")


@every_format
@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input(fmt, policy, dtype):
    x = all_16_bit(dtype)
    assert_same_codes(cast_nearest(x, fmt, **policy), expected_codes(x.float().numpy(), fmt, **policy), fmt)


@every_format
@every_policy
def test_float32_at_every_value_midpoint_and_neighbour(fmt, policy):
    x = float32_edges(fmt)
    assert_same_codes(cast_nearest(torch.from_numpy(x), fmt, **policy), expected_codes(x, fmt, **policy), fmt)


@every_format
@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("encode_scale", ENCODE_SCALES)
def test_the_product_with_the_scale_is_float32(fmt, policy, dtype, encode_scale):
    x = torch.from_numpy(float32_edges(fmt)) if dtype is torch.float32 else all_16_bit(dtype)
    actual = cast_nearest(x, fmt, torch.tensor(encode_scale), **policy)
    expected = expected_codes(x.float().numpy(), fmt, np.float32(encode_scale), **policy)
    assert_same_codes(actual, expected, fmt)


@every_format
def test_scale_that_puts_products_on_the_edges(fmt):
    """Inputs chosen so that x · encode_scale falls on and beside the values and midpoints."""
    encode_scale = np.float32(448 / 3.7)
    edges = float32_edges(fmt)
    finite = edges[np.isfinite(edges)]
    nearby = (finite / encode_scale).astype(np.float32)
    x = np.concatenate([nearby, np.nextafter(nearby, np.float32(0)), np.nextafter(nearby, np.float32(1e9))])
    actual = cast_nearest(torch.from_numpy(x), fmt, torch.tensor(encode_scale))
    assert_same_codes(actual, expected_codes(x, fmt, encode_scale), fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_scalar_reference_of_the_whole_chain(fmt):
    """Product, its rounding to float32 and the cast, all by the scalar reference, for random inputs and scales."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(1500, generator=generator) * 100).bfloat16()
    scales = (torch.randn(1500, generator=generator) * 2).exp()
    codes = cast_nearest(x, fmt, scales)

    def chain(value: float, scale: float) -> int:
        exact = value * scale  # 8 and 24 significant bits: exact in a double
        return encode(decode(encode(exact, FP32), FP32), fmt)

    expected = [chain(value, scale) for value, scale in zip(x.tolist(), scales.tolist(), strict=True)]
    assert codes.view(torch.uint8).tolist() == expected


@every_format
def test_float64_is_rounded_to_float32_first(fmt):
    """Just above a midpoint by less than float32 resolves: the tie decides, as it does for the float32 input."""
    tie = (fmt.magnitude(0x31) + fmt.magnitude(0x32)) / 2
    beside = torch.tensor([tie, np.nextafter(tie, np.inf), np.nextafter(tie, 0), 1e300, -1e300], dtype=torch.float64)
    with np.errstate(over="ignore"):
        narrowed = beside.numpy().astype(np.float32)
    assert_same_codes(cast_nearest(beside, fmt), expected_codes(narrowed, fmt), fmt)


def test_a_product_in_bfloat16_would_change_one_code_in_32():
    """It lands on a midpoint of E4M3 once in 16 times, and half of those ties go the wrong way."""
    x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    encode_scales = torch.linspace(64, 128, 257)[:-1, None]  # one binade: a single scale changes 0 to 7 %
    codes = cast_nearest(x.expand(256, -1), E4M3, encode_scales).view(torch.uint8)
    early = cast_nearest((x.float() * encode_scales).bfloat16(), E4M3).view(torch.uint8)
    assert (codes != early).float().mean().item() == pytest.approx(1 / 32, rel=0.1)


def values(fmt: Format) -> list[float]:
    return [decode(code, fmt) for code in range(1 << fmt.bits) if code not in fmt.nan_codes]


@pytest.mark.parametrize("wide", [BF16, FP16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_fp8_value_is_a_16_bit_value_and_returns_to_its_code(fmt, wide):
    held = torch.tensor(values(fmt), dtype=wide.torch_dtype)
    assert held.double().tolist() == values(fmt)
    codes = cast_nearest(held, fmt).view(torch.uint8).tolist()
    assert codes == [code for code in range(256) if code not in fmt.nan_codes]
