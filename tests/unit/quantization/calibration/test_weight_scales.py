import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.numerics import PerBlock, PerRow, PerTensor, ScaleRounding, scale_from_amax
from octavo.quantization.calibration.weight_scales import WeightMethod, quantized_weight, sums_over_groups
from octavo.recipes import CastSpec

SHAPE = (300, 200)  # ragged at 128


def weight(seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(SHAPE, generator=generator) * torch.exp(torch.randn(SHAPE[0], 1, generator=generator))
    w[7] = 0
    return w


def spec(granularity, rounding="fp32"):
    return CastSpec(format=E4M3, granularity=granularity, scale_rounding=ScaleRounding(rounding))


def best_of_group(group, rounding="fp32"):
    """The scale of least squared error among amax · 2^(-i/16), i = 0 … 16, by trying each."""
    best = None
    for i in range(17):
        tried = torch.tensor(group.abs().max().item() * 2 ** (-i / 16))
        scale = scale_from_amax(tried, E4M3, rounding=ScaleRounding(rounding))
        y = octavo.quantize(group, E4M3, scale=scale).dequantize()
        error = (group.double() - y.double()).square().sum().item()
        if best is None or error < best[0] * (1 - 1e-12):
            best = error, scale
    assert best is not None
    return best[1]


@pytest.mark.parametrize("rounding", ["fp32", "rceil"])
def test_max_per_row_is_a_loop_over_rows_bitwise(rounding):
    w = weight()
    q = quantized_weight(w, spec(PerRow(), rounding), WeightMethod.MAX)
    for index, row in enumerate(w):
        alone = octavo.quantize(row, E4M3, scale_rounding=ScaleRounding(rounding))
        assert torch.equal(q.scale[index, 0], alone.scale)
        assert torch.equal(q.data[index].view(torch.uint8), alone.data.view(torch.uint8))


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
def test_max_is_what_the_recipes_cast_makes(granularity):
    w = weight()
    q, own = quantized_weight(w, spec(granularity), WeightMethod.MAX), octavo.quantize(w, E4M3, granularity=granularity)
    assert torch.equal(q.scale, own.scale)
    assert torch.equal(q.data.view(torch.uint8), own.data.view(torch.uint8))


@pytest.mark.parametrize("rounding", ["fp32", "rceil"])
def test_mse_per_row_is_the_search_over_each_row(rounding):
    w = weight(1)[:40]
    q = quantized_weight(w, spec(PerRow(), rounding), WeightMethod.MSE)
    for index, row in enumerate(w):
        assert q.scale[index, 0] == best_of_group(row, rounding), index


def test_mse_per_block_and_tensor_are_the_search_over_each():
    w = weight(2)
    q = quantized_weight(w, spec(PerBlock(128, 128)), WeightMethod.MSE)
    for i in range(3):
        for j in range(2):
            assert q.scale[i, j] == best_of_group(w[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128])
    assert quantized_weight(w, spec(PerTensor()), WeightMethod.MSE).scale == best_of_group(w)


def test_mse_is_never_worse_and_somewhere_better():
    w = weight(3)
    errors = []
    for method in WeightMethod:
        y = quantized_weight(w, spec(PerRow()), method).dequantize()
        errors.append((w - y).double().square().sum(1))
    assert (errors[1] <= errors[0] * (1 + 1e-9)).all()
    assert (errors[1] < 0.99 * errors[0]).any()


def test_a_bfloat16_weight_is_judged_by_what_its_codes_decode_to():
    """Decoding to bfloat16 would add another rounding to the error."""
    w = weight(4)[:20].bfloat16()
    q = quantized_weight(w, spec(PerRow()), WeightMethod.MSE)
    for index, row in enumerate(w.float()):
        assert q.scale[index, 0] == best_of_group(row)


def test_sums_over_groups_are_those_of_the_slices():
    x = torch.randn(130, 129, dtype=torch.float64)
    found = sums_over_groups(x, PerBlock(128, 128))
    expected = torch.stack([torch.stack([x[:128, :128].sum(), x[:128, 128:].sum()]),
                            torch.stack([x[128:, :128].sum(), x[128:, 128:].sum()])])  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert found.shape == PerBlock(128, 128).scale_shape(x.shape)


def test_a_broken_weight_is_refused():
    w = weight()
    w[3, 4] = float("nan")
    with pytest.raises(ConfigError, match="the weight contains NaN or infinity"):
        quantized_weight(w, spec(PerTensor()), WeightMethod.MAX)
