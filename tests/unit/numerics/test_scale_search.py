"""The search for a vector's scale against a loop over numbers and scales, and against what codes decode to."""

import math
from fractions import Fraction

import pytest
import torch

from octavo import E4M3, PerRow, PerTensor, quantize
from octavo.numerics import ScaleRounding
from octavo.numerics.scale_search import SMALLEST_AMAX, STEPS, searched_scale


def vectors(*shape):
    """Two numbers of each are large, as in keys."""
    x = torch.randn(*shape)
    x[..., 3] += 11
    x[..., 5] -= 7
    return x


def searched_slowly(vector):
    """Number by number in exact fractions; numbers are few enough bits that no product is rounded but by FP32."""
    finite = [abs(x) for x in vector.tolist() if math.isfinite(x)]
    power = 2.0 ** math.ceil(math.log2(max([*finite, SMALLEST_AMAX]) / E4M3.max))
    errors = {}
    for step in range(STEPS, 2 * STEPS):
        errors[step] = 0
        for x in finite:
            y = (torch.tensor(x / power) * torch.tensor(64 * STEPS / step)).item()
            if y:
                unit = Fraction(2) ** (math.frexp(y)[1] - E4M3.mantissa_bits - 1)
                left = float(Fraction(y) - unit * math.floor(Fraction(y) / unit + Fraction(1, 2)))
                errors[step] += int((torch.tensor(left) * torch.tensor(left)).item())
        errors[step] *= step * step
    return power * min(errors, key=lambda step: errors[step]) / STEPS


@pytest.mark.parametrize("size", [1.0, 2.0**-140, 2.0**-120, 2.0**-13, 2.0**20, 2.0**118])
def test_the_scale_is_that_of_a_slow_search(size):
    x = size * vectors(30, 16)
    x[0, 1], x[0, 2], x[1] = torch.inf, torch.nan, 0
    assert searched_scale(x)[:, 0].tolist() == [searched_slowly(vector) for vector in x]


@pytest.mark.parametrize("width", [1, 7, 64, 512])
def test_no_scale_of_the_binade_decodes_much_better(width):
    """A search over integers misses less than a thousandth of the error."""
    x = vectors(50, max(width, 6))[:, :width]
    power = quantize(x, E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL).scale
    scales = [power * step / STEPS for step in range(STEPS, 2 * STEPS)]
    decoded = [quantize(x, E4M3, granularity=PerRow(), scale=scale).dequantize() for scale in scales]
    errors = torch.stack([(each.double() - x).square().sum(-1) for each in decoded])
    found = quantize(x, E4M3, granularity=PerRow(), scale=searched_scale(x)).dequantize()
    error = (found.double() - x).square().sum(-1)
    assert (error <= 1.001 * errors.amin(0) + 1e-6 * x.square().sum(-1)).all()


def test_the_search_halves_the_squared_error():
    x = vectors(500, 64)
    plain = quantize(x, E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL).dequantize()
    found = quantize(x, E4M3, granularity=PerRow(), scale=searched_scale(x)).dequantize()
    assert float((found - x).square().sum()) < 0.5 * float((plain - x).square().sum())


def test_the_largest_error_does_not_overflow():
    """512 numbers in the middle between 256 and 288, 16 from both, or as near to it as another scale leaves them."""
    x = torch.full((1, 512), 272.0)
    x[0, 0] = 448.0
    assert searched_scale(x).item() == searched_slowly(x[0])


def test_scales_are_bfloat16_numbers():
    scale = searched_scale(vectors(300, 64))
    assert torch.equal(scale.bfloat16().float(), scale)
    assert len({math.frexp(x)[0] for x in scale.flatten().tolist()}) == STEPS


def test_neither_order_nor_neighbours_change_a_scale():
    x = vectors(40, 3, 64)
    assert torch.equal(searched_scale(x[..., torch.randperm(64)]), searched_scale(x))
    assert torch.equal(searched_scale(x)[7, 1], searched_scale(x[7, 1]))


def test_special_values():
    x = torch.zeros(4, 16)
    x[1, 2], x[2], x[3, :2] = 1e-44, torch.nan, torch.tensor([-torch.inf, 3e38])
    scale = searched_scale(x)[:, 0]
    assert scale[:3].tolist() == [2.0**-126] * 3
    assert torch.isfinite(scale[3])
    assert 3e38 / scale[3] <= E4M3.max
    alone = quantize(x[3], E4M3, granularity=PerTensor(), scale=scale[3]).dequantize()
    assert alone[0].isnan()
    assert alone[1] == pytest.approx(3e38, rel=0.07)
