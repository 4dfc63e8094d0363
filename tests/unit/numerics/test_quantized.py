"""Quantize and dequantize against a loop over scaling groups, special elements, fixed scales, and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, E5M2, E8M0, FP8_FORMATS
from octavo.numerics import (
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    cast_nearest,
    dequantize,
    quantize,
)
from tests.oracle.rounding_table import assert_same_codes, expected_codes
from tests.oracle.scale_formula import decode_scale, encode_scale

GRANULARITIES = [PerTensor(), PerRow(), PerBlock(2, 3)]
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
ROUNDINGS = list(ScaleRounding)
every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


def groups(granularity, rows, columns):
    """Row and column slices of every scaling group of a matrix, in the scale's order."""
    match granularity:
        case PerTensor():
            height, width = rows, columns
        case PerRow():
            height, width = 1, columns
        case PerBlock(height, width):
            pass
    starts = itertools.product(range(0, rows, height), range(0, columns, width))
    return [(slice(row, row + height), slice(column, column + width)) for row, column in starts]


def bits_of(x):
    return x.view(torch.int32).tolist()


@every_granularity
@every_format
@every_dtype
@pytest.mark.parametrize("scale_rounding", ROUNDINGS)
def test_equals_a_loop_over_groups(granularity, fmt, dtype, scale_rounding):
    x = (torch.randn(5, 7) * torch.rand(5, 1) * 100).to(dtype)
    x[2] = 0
    q = quantize(x, fmt, granularity=granularity, scale_rounding=scale_rounding)
    scales = []
    for where in groups(granularity, 5, 7):
        group = x[where].float()
        encode = encode_scale(group.abs().max().item(), fmt.max, rounding=scale_rounding)
        assert_same_codes(q.data[where], expected_codes(group.numpy(), fmt, np.float32(encode)), fmt)
        scales.append(decode_scale(encode))
    assert q.scale.dtype is torch.float32
    assert q.scale.flatten().tolist() == scales


@every_granularity
@every_dtype
def test_dequantize_multiplies_in_float32_and_returns_the_dtype(granularity, dtype):
    x = torch.randn(5, 7).mul(30).to(dtype)
    q = quantize(x, E4M3, granularity=granularity)
    expected = torch.empty_like(x)
    for index, where in enumerate(groups(granularity, 5, 7)):
        codes = q.data[where].float().numpy()
        product = codes * np.float32(q.scale.flatten()[index].item())
        expected[where] = torch.from_numpy(product).to(dtype)
    assert q.dequantize().dtype is dtype
    assert torch.equal(q.dequantize(), expected)
    assert torch.equal(dequantize(q), expected)


@every_granularity
def test_attributes(granularity):
    x = torch.randn(5, 7).bfloat16()
    q = quantize(x, E5M2, granularity=granularity)
    assert (q.format, q.shape, q.granularity, q.hp_dtype) == (E5M2, x.shape, granularity, torch.bfloat16)
    assert q.nbytes == 35 + 4 * q.scale.numel()


def test_one_scale_for_the_tensor_is_the_default():
    assert quantize(torch.randn(5, 7), E4M3).granularity == PerTensor()


@every_granularity
@every_format
@pytest.mark.parametrize("amax_floor", [1e-12, 0.0])
def test_zeros_become_zeros(granularity, fmt, amax_floor):
    q = quantize(torch.zeros(5, 7), fmt, granularity=granularity, amax_floor=amax_floor)
    assert not q.data.view(torch.uint8).any()
    assert q.scale.isfinite().all()
    assert (q.scale > 0).all()
    assert torch.equal(q.dequantize(), torch.zeros(5, 7))


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tiny_tensors_keep_their_values(fmt, dtype):
    """A scale computed in float16 would be 0 or infinite here."""
    smallest = torch.finfo(dtype).smallest_normal
    x = torch.tensor([1.0, -0.5, 0.25, 0.0], dtype=dtype) * smallest
    q = quantize(x, fmt)
    if dtype is torch.float16:  # elsewhere the encode scale is cut at float32's largest
        assert q.data.float().abs().max() == fmt.max
    assert torch.equal(q.dequantize()[:1].abs() > 0, torch.tensor([True]))
    torch.testing.assert_close(q.dequantize(), x, rtol=0.13, atol=0)


@every_granularity
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("nonfinite", Nonfinite)
def test_bad_elements_touch_only_themselves(granularity, fmt, dtype, nonfinite):
    x = torch.randn(5, 7).to(dtype)
    places, bad = ([0, 2, 2, 4], [6, 0, 1, 3]), torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    without, poisoned = x.index_put(tuple(map(torch.tensor, places)), x.new_zeros(4)), x.clone()
    poisoned[places] = bad.to(dtype)
    clean = quantize(without, fmt, granularity=granularity)
    q = quantize(poisoned, fmt, granularity=granularity, nonfinite=nonfinite)
    assert bits_of(q.scale) == bits_of(clean.scale)
    untouched = torch.ones(5, 7, dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(q.data.view(torch.uint8)[untouched], clean.data.view(torch.uint8)[untouched])
    wanted = cast_nearest(bad, fmt, nonfinite=nonfinite).float()
    torch.testing.assert_close(q.data.float()[places], wanted, rtol=0, atol=0, equal_nan=True)


@every_granularity
@pytest.mark.parametrize("given", ["amax", "scale"])
def test_bad_elements_show_under_a_given_scale_too(granularity, given):
    x = torch.randn(5, 7)
    x[1, 2], x[3, 4], x[4, 5] = math.inf, -math.inf, math.nan
    ones = torch.ones(granularity.scale_shape(x.shape))
    amax, scale = (ones, None) if given == "amax" else (None, ones)
    q = quantize(x, E5M2, granularity=granularity, amax=amax, scale=scale)
    assert [q.data.float()[place].item() for place in ((1, 2), (3, 4))] == [math.inf, -math.inf]
    assert torch.equal(q.data.float().isfinite(), x.isfinite())


def test_tensor_of_only_nonfinite_elements_has_a_finite_scale():
    q = quantize(torch.tensor([math.nan, math.inf]), E5M2)
    assert q.scale.isfinite()
    assert q.dequantize()[0].isnan()
    assert q.dequantize()[1] == math.inf


@every_granularity
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_tensors(granularity, shape):
    q = quantize(torch.ones(shape), E4M3, granularity=granularity)
    assert q.data.shape == shape
    assert q.scale.shape == granularity.scale_shape(torch.Size(shape))
    assert q.scale.isfinite().all()
    assert torch.equal(q.dequantize(), torch.ones(shape))


@every_granularity
def test_strides_do_not_matter(granularity):
    x = torch.randn(7, 10)
    for view in (x.t(), x[::2, 1::3], x[:, :1].expand(7, 4)):
        ours, plain = (
            quantize(view, E4M3, granularity=granularity),
            quantize(view.contiguous(), E4M3, granularity=granularity),
        )
        assert torch.equal(ours.data.view(torch.uint8), plain.data.view(torch.uint8))
        assert torch.equal(ours.scale, plain.scale)


@every_granularity
def test_a_given_amax_takes_the_measured_ones_place(granularity):
    x = torch.randn(5, 7)
    shape = granularity.scale_shape(x.shape)
    q = quantize(x, E4M3, granularity=granularity, amax=torch.full(shape, 0.5))
    assert torch.equal(q.scale, torch.full(shape, decode_scale(encode_scale(0.5, E4M3.max))))
    assert_same_codes(q.data, expected_codes(x.numpy(), E4M3, np.float32(encode_scale(0.5, E4M3.max))), E4M3)
    assert q.data.float().abs().max() == E4M3.max  # what lies beyond saturates


@every_granularity
def test_a_given_scale_decodes(granularity):
    x = torch.randn(5, 7)
    scale = torch.full(granularity.scale_shape(x.shape), 0.03)
    q = quantize(
        x, E4M3, granularity=granularity, scale=scale, margin=5, scale_rounding=ScaleRounding.RCEIL, amax_floor=9.0
    )
    assert torch.equal(q.scale, scale)
    assert_same_codes(q.data, expected_codes(x.numpy(), E4M3, np.float32(1) / np.float32(0.03)), E4M3)


def test_a_given_scale_is_stored_as_float32():
    scale = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    q = quantize(torch.ones(3), E4M3, scale=scale)
    assert (q.scale.dtype, q.scale.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize("margin", [0, 1, 9])
@pytest.mark.parametrize("scale_rounding", ROUNDINGS)
@every_format
def test_amaxes_from_the_smallest_number_up(fmt, scale_rounding, margin):
    """Every binade from 2^-149 to where max / amax is finite, against the formula in fractions."""
    for exponent in range(-149, -100, 3):
        x = torch.tensor([1.5, -1.0, 0.375, 0.0]) * 2.0**exponent
        q = quantize(x, fmt, scale_rounding=scale_rounding, margin=margin)
        encode = encode_scale(x.max().item(), fmt.max, rounding=scale_rounding, margin=margin)
        assert_same_codes(q.data, expected_codes(x.numpy(), fmt, np.float32(encode)), fmt)
        assert q.scale.item() == decode_scale(encode)


def test_a_tensor_whose_scale_would_overflow_keeps_its_values():
    """448 / 6.6e-37 is beyond FP32: the encode scale is FP32's largest number, under which 6.6e-37 is 224.6."""
    q = quantize(torch.tensor([6.6e-37, -3.3e-37]), E4M3)
    assert q.scale.item() == float(np.float32(1) / np.finfo(np.float32).max)
    torch.testing.assert_close(q.dequantize(), torch.tensor([6.6e-37, -3.3e-37]), rtol=2.0**-4, atol=0)


def test_the_smallest_scale_octavo_makes_can_be_given_back():
    """Its reciprocal rounds to infinity; zeros would become NaN."""
    x = torch.tensor([0.0, 1e-38, 1e-37])
    q = quantize(x, E4M3)
    again = quantize(q.dequantize(), E4M3, scale=q.scale)
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


def test_transpose_shares_codes_and_is_the_quantized_transpose():
    x = torch.randn(6, 4)
    for granularity in (PerTensor(), PerBlock(2, 2)):
        for scale_rounding in ROUNDINGS:  # requantizing a transposed power-of-two tensor changed codes elsewhere
            q = quantize(x, E4M3, granularity=granularity, scale_rounding=scale_rounding)
            fresh = quantize(x.t(), E4M3, granularity=granularity, scale_rounding=scale_rounding)
            assert q.t().data.data_ptr() == q.data.data_ptr()
            assert torch.equal(q.t().data.view(torch.uint8), fresh.data.view(torch.uint8))
            assert torch.equal(q.t().scale, fresh.scale)
            assert torch.equal(q.t().dequantize(), q.dequantize().t())


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(1, 2)], ids=str)
def test_groups_that_the_transpose_does_not_have_refuse_it(granularity):
    with pytest.raises(ConfigError, match="cannot be transposed; quantize the transposed tensor instead"):
        quantize(torch.randn(6, 4), E4M3, granularity=granularity).t()


def test_only_a_matrix_has_a_transpose():
    with pytest.raises(ConfigError, match=r"transposes a matrix, not shape \(2, 3, 4\); flatten it first"):
        quantize(torch.randn(2, 3, 4), E4M3).t()


def test_quantize_passes_no_gradient():
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    q = quantize(parameter, E4M3, granularity=PerRow())
    assert not q.data.requires_grad
    assert not q.scale.requires_grad
    assert not q.dequantize().requires_grad


def test_quantize_leaves_its_input():
    x = torch.tensor([1e9, -math.inf, math.nan, 0.1])
    before = x.clone()
    quantize(x, E4M3)
    assert bits_of(x) == bits_of(before)


@pytest.mark.parametrize(
    "x",
    [torch.arange(3), torch.tensor([True]), torch.ones(2).to(torch.float8_e5m2), torch.ones(2, dtype=torch.complex64)],
    ids=lambda x: str(x.dtype),
)
def test_refuses_what_is_not_high_precision(x):
    with pytest.raises(ConfigError, match=rf"must be a float16, bfloat16, float32 or float64 tensor, not {x.dtype};"):
        quantize(x, E4M3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fmt": BF16}, "cannot cast to BF16; use one of octavo.formats.E4M3"),
        ({"fmt": "fp8"}, "cannot cast to 'fp8'; use one of"),
        ({"granularity": "rowwise"}, r"granularity must be octavo.PerTensor\(\), .* not 'rowwise'"),
        ({"amax": torch.tensor(1.0), "scale": torch.tensor(1.0)}, "an amax or a scale, not both; leave one out"),
        ({"scale": torch.tensor(0.0)}, "every scale must be finite and positive, not 0.0"),
        ({"scale": torch.tensor(-1.0)}, "every scale must be finite and positive, not -1.0"),
        ({"scale": torch.tensor([[1.0], [2.0], [float("inf")], [1.0]]), "granularity": PerRow()}, "positive, not inf"),
        ({"amax": torch.tensor(-2.0)}, "every amax must be finite and not negative, not -2.0"),
        ({"amax": torch.tensor(float("nan"))}, "every amax must be finite and not negative, not nan"),
        ({"scale": torch.ones(4)}, r"of \(4, 6\) needs a scale of shape \(\), not \(4,\)"),
        ({"amax": torch.ones(4, 1)}, r"needs a scale of shape \(\), not \(4, 1\)"),
        ({"scale": torch.ones(4), "granularity": PerRow()}, r"needs a scale of shape \(4, 1\), not \(4,\)"),
        ({"scale": torch.ones(2, 3), "granularity": PerBlock(2, 3)}, r"of shape \(2, 2\), not \(2, 3\)"),
        ({"margin": -1}, "margin must be 0 or more binades, not -1"),
        ({"amax_floor": -1.0}, "amax_floor must be 0 or more and finite, not -1.0"),
        ({"nonfinite": "drop"}, "nonfinite must be one of propagate, saturate, not 'drop'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_say_what_was_given_and_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        quantize(torch.ones(4, 6), **{"fmt": E4M3, **options})


def test_a_quantized_tensor_checks_its_scale():
    codes = torch.ones(4, 6).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"PerRow\(\) scale of codes \(4, 6\) has shape \(4, 1\), not \(\)"):
        QuantizedTensor(codes, torch.tensor(1.0), PerRow(), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": 1.0}, "scale must be a tensor"),
        ({"amax": 3.0}, "amax must be a tensor"),
        ({"margin": 1.5}, "margin must be 0 or more"),
        ({"x": [1.0]}, "must be a torch.Tensor, not list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_the_wrong_kind_get_a_sentence(arguments, words):
    x = arguments.pop("x", torch.ones(3))
    with pytest.raises(ConfigError, match=words):
        quantize(x, E4M3, **arguments)


def test_codes_and_scale_have_their_dtypes():
    with pytest.raises(ConfigError, match=r"codes have an FP8 dtype, not torch\.float32"):
        QuantizedTensor(torch.ones(2), torch.tensor(1.0), PerTensor(), torch.float32)
    with pytest.raises(ConfigError, match=r"a scale is float32, or uint8 for E8M0 bytes, not torch\.bfloat16"):
        QuantizedTensor(
            torch.ones(2).to(E4M3.torch_dtype), torch.tensor(1.0, dtype=torch.bfloat16), PerTensor(), torch.float32
        )


def test_a_given_e8m0_scale_is_a_power_of_two():
    x = torch.randn(2, 64)
    scale = torch.tensor([[0.5, 2.0], [1.0, 2.0**-127]])
    q = quantize(x, E4M3, granularity=PerBlock(1, 32), scale=scale, scale_format=E8M0)
    assert torch.equal(q.fp32_scale, scale)
    with pytest.raises(ConfigError, match=r"E8M0 holds powers of two, not the scale 0\.3"):
        quantize(x, E4M3, scale=torch.tensor(0.3), scale_format=E8M0)
