"""Stochastic rounding: exact values stay, others go to a neighbour with the right frequency, seeds repeat."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from octavo.formats import E4M3, E4M3_FNUZ, E5M2, FP8_FORMATS
from octavo.numerics import cast, cast_stochastic
from octavo.numerics.cast import STOCHASTIC_BITS
from octavo.numerics.random_bits import random_bits, seed_from
from octavo.numerics.reference import decode, encode_stochastic
from tests.oracle.rounding_table import float32_edges, rounding_table

every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def codes_of(x, fmt, scale=None, *, seed=0):
    return cast_stochastic(x, fmt, scale, generator=seeded(seed)).view(torch.uint8)


@every_format
def test_exact_values_never_move(fmt):
    codes = [code for code in range(256) if code not in fmt.nan_codes]
    held = torch.tensor([decode(code, fmt) for code in codes])
    for seed in range(50):
        assert codes_of(held, fmt, seed=seed).tolist() == codes


@pytest.mark.parametrize(
    ("fmt", "wanted"), [(E4M3, [0x7F, 0xFF, 0x7F, 0xFF]), (E5M2, [0x7C, 0xFC, 0x7F, 0xFF])], ids=str
)
def test_nonfinite_elements_keep_their_sign(fmt, wanted):
    x = torch.tensor([math.inf, -math.inf, math.nan, math.copysign(math.nan, -1)])
    random = torch.zeros(4, dtype=torch.int32)
    assert cast.round_stochastic_by_torch(x, random, fmt.torch_dtype).view(torch.uint8).tolist() == wanted


@every_format
def test_the_largest_random_number_moves_all_but_exact_values(fmt, monkeypatch):
    """With it, the smallest fraction that 20 bits resolve goes up, half of that does not, and an exact value stays."""
    monkeypatch.setattr(cast, "random_bits", lambda seed, shape, device: torch.full(shape, -1, dtype=torch.int32))
    values = torch.tensor([fmt.magnitude(code) for code in range(fmt.max_code + 1)])
    smallest = values.diff() * 2.0**-STOCHASTIC_BITS
    low, high = values[:-1], values[1:]
    for sign in (1, -1):
        assert torch.equal(cast_stochastic(sign * values, fmt).float(), sign * values)
        assert torch.equal(cast_stochastic(sign * (low + smallest), fmt).float(), sign * high)
        assert torch.equal(cast_stochastic(sign * (low + smallest / 2), fmt).float(), sign * low)


@every_format
def test_goes_to_a_neighbour_and_keeps_the_sign(fmt):
    edges = float32_edges(fmt)
    x = edges[np.isfinite(edges) & (np.abs(edges) < fmt.max)]
    values = rounding_table(fmt).values
    below = np.searchsorted(values, np.abs(x).astype(np.float64), side="right") - 1
    for seed in range(5):
        got = cast_stochastic(torch.from_numpy(x), fmt, generator=seeded(seed)).float().numpy()
        assert ((np.abs(got) == values[below]) | (np.abs(got) == values[below + 1])).all()
        assert (np.signbit(got) == np.signbit(x))[got != 0].all()


@every_format
def test_never_crosses_the_maximum(fmt):
    beyond = torch.tensor([fmt.max, fmt.max * 1.01, fmt.max * 1.5, 1e30, 3e38]).repeat(2000)
    assert cast_stochastic(beyond, fmt, generator=seeded()).float().unique().tolist() == [fmt.max]
    assert cast_stochastic(-beyond, fmt, generator=seeded()).float().unique().tolist() == [-fmt.max]


@every_format
def test_equals_the_reference_with_the_same_random_integers(fmt):
    magnitudes = torch.randn(1200, generator=seeded(1)).mul(3).exp() * fmt.min_normal
    x = torch.where(torch.rand(1200, generator=seeded(2)) < 0.5, magnitudes, -magnitudes).clamp(-fmt.max, fmt.max)
    drawn = random_bits(seed_from(seeded(7)), x.shape, x.device)
    random = ((drawn >> (32 - STOCHASTIC_BITS)) & ((1 << STOCHASTIC_BITS) - 1)).tolist()
    expected = [
        encode_stochastic(value, fmt, uniform=Fraction(integer, 1 << STOCHASTIC_BITS))
        for value, integer in zip(x.tolist(), random, strict=True)
    ]
    assert codes_of(x, fmt, seed=7).tolist() == expected


@every_format
def test_the_product_with_the_scale_is_float32(fmt):
    x = torch.randn(4000, generator=seeded(1)).bfloat16()
    scale = torch.tensor(448 / 3.7)
    product = torch.from_numpy(x.float().numpy() * np.float32(scale.item()))
    assert torch.equal(codes_of(x, fmt, scale), codes_of(product, fmt))


@every_format
@pytest.mark.parametrize("fraction", [1 / 64, 0.25, 0.5, 0.875])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", ["normal", "subnormal", "smallest", "top"])
def test_frequency_is_the_dropped_fraction(fmt, fraction, sign, where):
    """Within 5 standard deviations of the binomial; the seed is fixed."""
    code = {"normal": fmt.max_code // 2, "subnormal": 1, "smallest": 0, "top": fmt.max_code - 1}[where]
    low, high = fmt.magnitude(code), fmt.magnitude(code + 1)
    count = 20000
    x = torch.full((count,), sign * (low + fraction * (high - low)))
    got = cast_stochastic(x, fmt, generator=seeded(11)).float()
    moved = int((got == sign * high).sum())
    assert int((got == sign * low).sum()) == count - moved
    assert abs(moved - count * fraction) <= 5 * math.sqrt(count * fraction * (1 - fraction))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_mean_is_the_input(fmt):
    """Where round-to-nearest would lose it: 1/8 of the smallest value, averaged."""
    x = torch.full((40000,), fmt.magnitude(1) / 8)
    mean = cast_stochastic(x, fmt, generator=seeded(5)).double().mean().item()
    assert mean == pytest.approx(fmt.magnitude(1) / 8, rel=5 * math.sqrt(7 / 40000))


def test_same_seed_same_codes_and_another_seed_others():
    x = torch.randn(5000, generator=seeded(1))
    assert torch.equal(codes_of(x, E4M3, seed=3), codes_of(x, E4M3, seed=3))
    assert not torch.equal(codes_of(x, E4M3, seed=3), codes_of(x, E4M3, seed=4))


def test_without_a_generator_the_global_seed_decides():
    x = torch.randn(5000)
    torch.manual_seed(9)
    first = cast_stochastic(x, E4M3).view(torch.uint8)
    torch.manual_seed(9)
    assert torch.equal(first, cast_stochastic(x, E4M3).view(torch.uint8))


def test_neighbouring_elements_use_different_random_bits():
    got = cast_stochastic(torch.full((64,), 1.0625), E4M3, generator=seeded()).float()
    assert set(got.tolist()) == {1.0, 1.125}


def test_negative_zero():
    tiny = torch.tensor([-0.0, -1e-30])
    assert codes_of(tiny, E4M3).tolist() == [0x80, 0x80]
    assert codes_of(tiny, E4M3_FNUZ).tolist() == [0, 0]
