"""Conversion between OCP and FNUZ codes, against ml_dtypes: every code, every granularity, scales at the edges."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, E8M0
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor, ScaleRounding, quantize
from octavo.numerics.fnuz import FNUZ_FORMATS, to_fnuz, to_ocp

PEERS = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3_FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2_FNUZ: ml_dtypes.float8_e5m2fnuz,
}
SCALE = 0.3
pairs = pytest.mark.parametrize(("ocp", "fnuz"), FNUZ_FORMATS.items(), ids=str)


def values_of(fmt, codes):
    """What ml_dtypes decodes the bytes to."""
    return codes.view(torch.uint8).numpy().view(PEERS[fmt]).astype(np.float64)


def with_scale(codes, scale=SCALE):
    return QuantizedTensor(codes, torch.tensor(scale), PerTensor(), torch.float32)


def all_codes(fmt):
    return torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)


@pytest.mark.parametrize("fmt", PEERS, ids=str)
def test_torch_and_ml_dtypes_decode_every_code_alike(fmt):
    np.testing.assert_array_equal(all_codes(fmt).double().numpy(), values_of(fmt, all_codes(fmt)))


@pairs
def test_every_ocp_code_keeps_its_value(ocp, fnuz):
    converted = to_fnuz(with_scale(all_codes(ocp)))
    before, after = values_of(ocp, all_codes(ocp)), 2 * values_of(fnuz, converted.tensor.data)
    infinite = np.isinf(before)
    np.testing.assert_array_equal(after[~infinite], before[~infinite])  # NaN included
    assert np.isnan(after[infinite]).all()
    assert (converted.changed, converted.largest_change) == (infinite.sum(), 0)
    assert converted.tensor.scale == torch.tensor(SCALE) * 2


@pairs
def test_every_fnuz_code_that_ocp_has_keeps_its_value(ocp, fnuz):
    halves = values_of(fnuz, all_codes(fnuz)) * 2
    kept = torch.from_numpy(~(np.abs(halves) > ocp.max))
    converted = to_ocp(with_scale(all_codes(fnuz)[kept]))
    np.testing.assert_array_equal(values_of(ocp, converted.tensor.data), halves[kept.numpy()])
    assert converted.changed == 0
    assert converted.tensor.scale == torch.tensor(SCALE) / 2
    assert (~kept).sum() == {E4M3: 2, E5M2: 8}[ocp]


@pairs
def test_a_group_with_a_code_beyond_keeps_its_scale_and_rounds_what_is_too_fine(ocp, fnuz):
    finite = all_codes(fnuz)[all_codes(fnuz).float().isfinite()]
    converted = to_ocp(with_scale(finite))
    before = values_of(fnuz, finite)
    expected = before.astype(np.float32).astype(PEERS[ocp]).astype(np.float64)
    np.testing.assert_array_equal(values_of(ocp, converted.tensor.data), expected)
    assert converted.tensor.scale == torch.tensor(SCALE)
    assert converted.changed == (before != expected).sum() > 0
    scale = float(torch.tensor(SCALE).double())
    assert converted.largest_change == np.abs(before - expected).max() * scale == fnuz.min_subnormal * scale


@pairs
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 32), PerBlock(16, 128)], ids=str)
def test_tensors_there_and_back(ocp, fnuz, granularity):
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 40)[:, None]
    q = quantize(x, ocp, granularity=granularity)
    there = to_fnuz(q)
    back = to_ocp(there.tensor)
    assert (there.changed, back.changed) == (0, 0)
    assert there.tensor.format == fnuz
    assert torch.equal(back.tensor.data.float(), q.data.float())
    assert torch.equal(back.tensor.scale, q.scale)
    assert torch.equal(there.tensor.dequantize(), q.dequantize())


def test_groups_are_converted_one_by_one():
    codes = torch.tensor([[240.0, 2.0**-10], [120.0, 2.0**-10]]).to(torch.float8_e4m3fnuz)
    converted = to_ocp(QuantizedTensor(codes, torch.ones(2, 1), PerRow(), torch.float32))
    assert converted.tensor.scale.flatten().tolist() == [1.0, 0.5]
    assert converted.tensor.dequantize().tolist() == [[240.0, 0.0], [120.0, 2.0**-10]]
    assert converted.changed == 1


def test_scales_of_one_byte():
    q = quantize(
        torch.randn(4, 64), E4M3, granularity=PerBlock(1, 32), scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0
    )
    converted = to_fnuz(q)
    assert torch.equal(converted.tensor.scale.int(), q.scale.int() + 1)
    assert converted.changed == 0
    assert torch.equal(to_ocp(converted.tensor).tensor.scale, q.scale)


@pytest.mark.parametrize("scale", [2.0**127, torch.finfo(torch.float32).max])
def test_a_scale_that_cannot_be_doubled_stays(scale):
    codes = torch.tensor([448.0, 1.0]).to(torch.float8_e4m3fn)
    converted = to_fnuz(with_scale(codes, scale))
    assert converted.tensor.scale == scale
    assert converted.tensor.data.float().tolist() == [240.0, 1.0]
    assert converted.changed == 1


def test_a_scale_that_cannot_be_halved_exactly_stays():
    smallest = 2.0**-149
    converted = to_ocp(with_scale(torch.tensor([120.0]).to(torch.float8_e4m3fnuz), smallest))
    assert converted.tensor.scale == smallest
    assert converted.changed == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_empty_tensors(shape):
    codes = torch.empty(shape).to(torch.float8_e4m3fn)
    assert to_fnuz(with_scale(codes)).changed == 0


def test_codes_of_the_wrong_family_are_refused():
    ocp, fnuz = with_scale(all_codes(E4M3)), with_scale(all_codes(E4M3_FNUZ))
    with pytest.raises(ConfigError, match="codes to convert are E4M3 and E5M2, not E4M3_FNUZ"):
        to_fnuz(fnuz)
    with pytest.raises(ConfigError, match="codes to convert are E4M3_FNUZ and E5M2_FNUZ, not E4M3"):
        to_ocp(ocp)
