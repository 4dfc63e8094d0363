"""The measures against numpy in float64, and the published anchors of healthy and unhealthy tensors."""

import math

import numpy as np
import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.numerics import (
    PerBlock,
    PerRow,
    PerTensor,
    flushed_energy,
    nonfinite_count,
    quantize,
    saturation_fraction,
    sqnr_db,
    underflow_fraction,
)

GRANULARITIES = [PerTensor(), PerRow(), PerBlock(3, 5)]
SAMPLES = 1 << 18


def gaussian(seed=0):
    return torch.randn(SAMPLES, generator=torch.Generator().manual_seed(seed))


def unit_rms(x):
    return x / x.square().mean().sqrt()


def wide(rows=20, columns=33):
    """Magnitudes over 30 binades, some zeros, both signs."""
    x = torch.randn(rows, columns).mul(5).exp() * torch.randn(rows, columns).sign()
    x[3, 4] = x[7] = 0
    return x


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measures_equal_numpy(granularity, dtype):
    x = wide().to(dtype)
    scale = quantize(x, E4M3, granularity=granularity).scale / 4  # so that something saturates
    q = quantize(x, E4M3, granularity=granularity, scale=scale)
    original, decoded = x.double().numpy(), q.dequantize().double().numpy()
    codes = q.data.float().numpy()
    full_scale = granularity.expand(scale, x.shape).broadcast_to(x.shape).double().numpy()
    noise = ((original - decoded) ** 2).sum()
    flushed = (codes == 0) & (original != 0)
    assert sqnr_db(x, q.dequantize()) == pytest.approx(10 * np.log10((original**2).sum() / noise), rel=1e-12)
    assert underflow_fraction(x, q) == flushed.sum() / (original != 0).sum() > 0
    assert flushed_energy(x, q) == pytest.approx((original[flushed] ** 2).sum() / (original**2).sum(), rel=1e-12)
    assert saturation_fraction(x, q) == (np.abs(original) > full_scale * 464).mean() > 0


def test_elements_that_are_not_finite_do_not_count():
    x = wide()
    places = torch.zeros_like(x, dtype=torch.bool)
    places[0, :3] = True
    poisoned = torch.where(places, torch.tensor(math.nan), x)
    poisoned[0, 0] = math.inf
    kept = x[~places]
    q, q_kept = quantize(poisoned, E4M3), quantize(kept, E4M3)
    assert sqnr_db(poisoned, q.dequantize()) == pytest.approx(sqnr_db(kept, q_kept.dequantize()), rel=1e-12)
    assert underflow_fraction(poisoned, q) == underflow_fraction(kept, q_kept)
    assert flushed_energy(poisoned, q) == pytest.approx(flushed_energy(kept, q_kept), rel=1e-12)
    assert saturation_fraction(poisoned, q) == saturation_fraction(kept, q_kept)
    assert nonfinite_count(poisoned) == 3


def test_limits_of_sqnr():
    x = torch.tensor([1.0, 2.0])
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(torch.zeros(2), x) == -math.inf
    assert sqnr_db(torch.ones(0), torch.ones(0)) == math.inf
    assert sqnr_db(x, 2 * x) == 0.0


@pytest.mark.parametrize(
    "x", [torch.zeros(4), torch.ones(0), torch.full((3,), math.nan)], ids=["zeros", "empty", "nan"]
)
def test_tensors_without_anything_to_count(x):
    q = quantize(x, E4M3)
    assert underflow_fraction(x, q) == flushed_energy(x, q) == saturation_fraction(x, q) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_count(value):
    x = torch.zeros(5, 7)
    x[1, 2] = x[4, 4] = value
    assert nonfinite_count(x) == 2
    assert nonfinite_count(x[2:4]) == 0


def test_rounding_to_the_maximum_is_not_saturation():
    x = torch.tensor([448.0, 463.0, 464.0, 464.5, 500.0])
    assert saturation_fraction(x, quantize(x, E4M3, scale=torch.tensor(1.0))) == 2 / 5


@pytest.mark.parametrize(("fmt", "expected"), [(E4M3, 31.5), (E5M2, 25.6)], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("amax_over_rms", [None, 2**6, 2**10, 2**13])
def test_gaussian_sqnr_is_flat_while_the_outlier_grows(fmt, expected, amax_over_rms):
    """The rest of the tensor does not suffer from one outlier until amax / rms = 2^13."""
    x = unit_rms(gaussian())
    if amax_over_rms is not None:
        x[0] = amax_over_rms
    decoded = quantize(x, fmt).dequantize()
    assert sqnr_db(x[1:], decoded[1:]) == pytest.approx(expected, abs=0.15)


def test_beyond_2_to_the_13_an_outlier_costs_e4m3_its_precision():
    x = unit_rms(gaussian())
    x[0] = 2.0**16
    decoded = quantize(x, E4M3).dequantize()
    assert sqnr_db(x[1:], decoded[1:]) < 22


@pytest.mark.parametrize(
    ("growth", "expected_db", "saturated"), [(1.5, 30.9, None), (2, 24.9, 0.013), (4, 10.6, 0.21), (8, 4.8, None)]
)
def test_stale_scales(growth, expected_db, saturated):
    """The scale of a Gaussian whose amax was 4.95 standard deviations, after its true amax grew."""
    x = gaussian()
    q = quantize(x, E4M3, amax=torch.tensor(4.95 / growth))
    assert sqnr_db(x, q.dequantize()) == pytest.approx(expected_db, abs=0.2)
    beyond = math.erfc(4.95 / growth * 464 / 448 / math.sqrt(2))
    assert saturation_fraction(x, q) == pytest.approx(beyond, abs=5 * math.sqrt(beyond / SAMPLES))
    if saturated is not None:  # counted from the amax itself, without the half step that still rounds to the maximum
        assert math.erfc(4.95 / growth / math.sqrt(2)) == pytest.approx(saturated, rel=0.05)


def test_sqnr_is_blind_to_underflow():
    """A log-normal gradient looks healthy by its SQNR while 62 % of it is gone."""
    signs = torch.randint(2, (SAMPLES,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = gaussian().mul(3).clamp(max=14.6).exp() * signs
    q = quantize(x, E4M3)
    assert 30.5 < sqnr_db(x, q.dequantize()) < 32.5
    assert underflow_fraction(x, q) == pytest.approx(0.62, abs=0.03)
    assert 0 < flushed_energy(x, q) < 1e-6
