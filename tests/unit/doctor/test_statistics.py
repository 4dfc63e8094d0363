"""The doctor's numbers against NumPy's float64: by torch's operations, and by the native kernel at every level."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor import statistics
from octavo.doctor.statistics import (
    CAST_FIELDS,
    CAST_SUMS,
    PRODUCT_FIELDS,
    PRODUCT_SUMS,
    cast_numbers,
    cast_sums,
    product_numbers,
    product_sums,
    spread,
    spread_indices,
    take_rows,
)
from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E8M0, FP32
from octavo.kernels import cast_statistics as native_statistics
from octavo.kernels import native_bindings, scaled_mm
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor, ScaleRounding
from octavo.numerics.scaling import AMAX_FLOOR
from tests.unit.doctor.cast_oracle import numbers_of, scales_of

GRANULARITIES = (PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32), PerBlock(3, 5))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("torch", *native_bindings.levels())
SHAPES = ((1, 1), (7, 33), (40, 96), (130, 261))
EXACT = ("amax", "nonfinite", "zero_fraction", "saturation_fraction", "underflow_fraction", "scale", "code_mismatch")


def found_by(way, x, made, *, amax_floor=AMAX_FLOOR):
    """CAST_FIELDS by name, from torch's operations or one level of the native kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_statistics, "sums", lambda *_: way != "torch")
        patch.setattr(native_statistics, "cast_sums", partial(native_statistics.cast_sums, level=way))
        sums = cast_sums(x, made, amax_floor=amax_floor)
    return dict(zip(CAST_FIELDS, cast_numbers(sums.numpy()).tolist(), strict=True))


def statistics_of(x, made):
    return cast_numbers(cast_sums(x, made).numpy())


def assert_right(x, made, ways=WAYS):
    turned = native_bindings.is_transposed(x)
    size, other = x.shape[::-1] if turned else x.shape
    rows = spread(size, statistics.SAMPLED_ELEMENTS // other)
    wanted = numbers_of(x, made, (slice(None), rows) if turned else (rows, slice(None)))
    assert wanted.keys() == set(CAST_FIELDS)
    for way in ways:
        found = found_by(way, x, made)
        for name in CAST_FIELDS:
            tolerance = 1e-12 if name in EXACT else 1e-6 if name in ("stale_ratio", "least_stale_ratio") else 1e-9
            assert found[name] == pytest.approx(wanted[name], rel=tolerance, abs=1e-15, nan_ok=True), (way, name)


def numbers(*shape, dtype=torch.float32, kind="wide"):
    """Nine decades, a few zeros; or with numbers that are none."""
    x = torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-6, 3)
    x[torch.rand(shape) < 0.1] = 0
    if kind == "broken":
        x[torch.rand(shape) < 0.05] = math.nan
        x[torch.rand(shape) < 0.05] = -math.inf
    return x.to(dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cast(shape, fmt, dtype, granularity):
    for kind in ("wide", "broken"):
        x = numbers(*shape, dtype=dtype, kind=kind)
        assert_right(x, octavo.quantize(x, fmt, granularity=granularity))
        assert_right(x.t(), octavo.quantize(x.t(), fmt, granularity=granularity))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("factor", [0.25, 0.93, 16.0])
def test_a_scale_for_other_numbers(factor, fmt, granularity):
    """Too small a scale saturates, and by how much is told; too large a one flushes."""
    for dtype in DTYPES:
        x = torch.randn(60, 90).to(dtype)
        scale = octavo.quantize(x, fmt, granularity=granularity).scale * factor
        assert_right(x, octavo.quantize(x, fmt, granularity=granularity, scale=scale))
        turned = octavo.quantize(x.t(), fmt, granularity=granularity)
        turned = octavo.quantize(x.t(), fmt, granularity=granularity, scale=turned.scale * factor)
        assert_right(x.t(), turned)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_whose_amax_grew(way):
    x = torch.randn(256, 256)
    made = octavo.quantize(x, E4M3, scale=x.abs().max() / 448 / 4)
    found = found_by(way, x, made)
    assert found["stale_ratio"] == pytest.approx(4, rel=1e-6)
    assert found["saturation_fraction"] == ((x.abs() / made.scale) > 464).double().mean()
    assert found["sqnr_db"] < 20


@pytest.mark.parametrize("way", WAYS)
def test_rows_whose_scale_is_too_large(way):
    """The largest g is that of the other rows; rows of zeros have none."""
    x = torch.randn(64, 64)
    x[::4] = 0
    scale = octavo.quantize(x, E4M3, granularity=PerRow()).scale.clone()
    scale[1::2] *= 256
    found = found_by(way, x, octavo.quantize(x, E4M3, granularity=PerRow(), scale=scale))
    assert (found["stale_ratio"], found["least_stale_ratio"]) == pytest.approx((1, 1 / 256), rel=1e-6)
    zeros = torch.zeros(4, 4)
    assert math.isnan(found_by(way, zeros, octavo.quantize(zeros, E4M3))["least_stale_ratio"])


@pytest.mark.parametrize("way", WAYS)
def test_rows_near_the_floor_have_no_scale_of_their_own(way):
    """Amaxes of 0.1, 9, 11 and 90 under a floor of 1: the scale of the first is the floor's."""
    x = torch.tensor([[0.1], [9.0], [11.0], [90.0]]).expand(4, 16).clone()
    made = octavo.quantize(x, E4M3, granularity=PerRow(), amax_floor=1.0)
    assert found_by(way, x, made, amax_floor=1.0)["least_stale_ratio"] == pytest.approx(1, rel=1e-6)
    assert found_by(way, x, made)["least_stale_ratio"] == pytest.approx(0.1, rel=1e-6)
    assert math.isnan(found_by(way, x[:2], take_rows(made, slice(2)), amax_floor=1.0)["least_stale_ratio"])


@pytest.mark.parametrize("way", WAYS)
def test_an_element_at_the_edge_is_not_saturated(way):
    """464 rounds to E4M3's 448 and the next number up does not; in 16 bits the edge itself must not be rounded."""
    limit = torch.tensor(464.0)
    x = torch.stack([limit, limit.nextafter(torch.tensor(1e9)), -limit, torch.tensor(1.0)])[None]
    assert found_by(way, x, octavo.quantize(x, E4M3, scale=torch.tensor(1.0)))["saturation_fraction"] == 0.25
    scale = torch.tensor(0.3009)  # 464 of these are 139.62, which BF16 would round to 140
    x = torch.tensor([[140.0, 139.0]], dtype=torch.bfloat16)
    assert found_by(way, x, octavo.quantize(x, E4M3, scale=scale))["saturation_fraction"] == 0.5


@pytest.mark.parametrize("way", WAYS)
def test_codes_of_another_tensor(way):
    x = torch.randn(64, 64)
    made = octavo.quantize(x, E4M3)
    other = QuantizedTensor(made.data.roll(1, 0), made.scale, made.granularity, made.hp_dtype)
    assert_right(x, other, [way])
    assert found_by(way, x, other)["code_mismatch"] > 0.9
    codes = made.data.view(torch.uint8).clone()
    codes[3, 5] = 0x7F
    broken = QuantizedTensor(codes.view(E4M3.torch_dtype), made.scale, made.granularity, made.hp_dtype)
    assert found_by(way, x, broken)["code_mismatch"] == 1 / 64**2, "a NaN code of a number is not its code"


@pytest.mark.parametrize("way", WAYS)
def test_delayed_scaling_has_no_code_mismatch(way):
    """Its encode scale is not the reciprocal of the stored one, which differs in the last bit."""
    for amax in torch.linspace(3, 9, 40):
        x = (torch.randn(32, 32)).bfloat16()
        assert found_by(way, x, octavo.quantize(x, E4M3, amax=amax))["code_mismatch"] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, math.nan, -math.inf])
def test_a_tensor_of_one_number(value, way):
    x = torch.full((9, 21), value)
    made = octavo.quantize(x, E5M2)
    if math.isfinite(value):
        assert_right(x, made, [way])
        assert found_by(way, x, made)["zero_fraction"] == (value == 0)
        return
    found = found_by(way, x, made)
    assert (found["amax"], found["nonfinite"], found["saturation_fraction"]) == (0, 9 * 21, 0)
    assert all(math.isnan(found[name]) for name in ("rms", "kurtosis", "sqnr_db", "cosine", "zero_fraction"))


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_scales_in_bytes(recipe):
    spec = octavo.recipes.get(recipe).output.a
    assert spec is not None
    granularity = spec.granularity
    for x in (numbers(70, 150), numbers(150, 70).t()):
        for scale_format in (E8M0, FP32):
            made = octavo.quantize(
                x, E4M3, granularity=granularity, scale_rounding=ScaleRounding.RCEIL, scale_format=scale_format
            )
            assert_right(x, made)


@pytest.mark.parametrize("shape", [(2000, 64), (3, 9000), (1, 40000)], ids=str)
def test_large_tensor_sums_a_sample_of_rows_and_counts_all(shape):
    x = torch.randn(shape)
    x[0, 0] = 1000.0
    x[-1, -1] = math.nan
    for granularity in (PerTensor(), PerRow(), PerBlock(1, 32)):
        for y in (x, x.t()):
            made = octavo.quantize(y, E4M3, granularity=granularity)
            assert_right(y, made)
            found = found_by(WAYS[-1], y, made)
            assert (found["amax"], found["nonfinite"]) == (1000.0, 1)


def test_strides_of_any_kind():
    x = torch.randn(64, 48)
    for view in (x[::3], x[:, ::2], x[5:, 7:40], x[:1].expand(20, 48), x.t()[3::2], x[:, 3:4], x.neg()):
        assert_right(view, octavo.quantize(view, E4M3, granularity=PerRow()))
        found, made = statistics_of(view, octavo.quantize(view, E4M3)), octavo.quantize(view.contiguous(), E4M3)
        np.testing.assert_allclose(found, statistics_of(view.contiguous(), made), rtol=1e-9, atol=1e-12)


def test_any_format_and_dtype_has_numbers():
    x = torch.randn(32, 32)
    for fmt in (E4M3_FNUZ, E4M3):
        found = statistics_of(x, octavo.quantize(x, fmt))
        assert found[CAST_FIELDS.index("sqnr_db")] == pytest.approx(31.5, abs=0.7)
    wide = statistics_of(x.double(), octavo.quantize(x.double(), E4M3))
    np.testing.assert_array_equal(wide, statistics_of(x, octavo.quantize(x, E4M3)))


def test_gaussian_tensor_has_its_known_statistics():
    x = torch.randn(128, 512)
    found = dict(zip(CAST_FIELDS, statistics_of(x, octavo.quantize(x, E4M3)).tolist(), strict=True))
    assert found["kurtosis"] == pytest.approx(3, abs=0.2)
    assert found["sqnr_db"] == pytest.approx(31.5, abs=0.5)
    assert abs(found["signed_error"]) < 2e-3
    assert found["stale_ratio"] == pytest.approx(1, rel=1e-6)
    assert found["code_mismatch"] == 0


@pytest.mark.parametrize("native", [True, False])
def test_gradients_and_threads_change_nothing(native, monkeypatch):
    if not native:
        monkeypatch.setattr(native_statistics, "sums", lambda *_: False)
    x = torch.randn(300, 200, requires_grad=True)
    made, before = octavo.quantize(x, E4M3), torch.get_num_threads()
    alone = cast_sums(x, made)
    assert not alone.requires_grad
    torch.set_num_threads(2)
    try:
        assert torch.equal(cast_sums(x, made), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 100, 1024, 4095])
@pytest.mark.parametrize("most", [0, 1, 2, 8, 64, 5000])
def test_rows_are_spread(size, most):
    rows = list(range(size))[spread(size, most)]
    assert 1 <= len(rows) <= max(1, most)
    assert len(rows) >= min(size, max(1, most)) / 3.1
    assert spread(size, most).step % 2 == 1
    assert rows[0] < size / 2 + 1
    assert rows == spread_indices(size, most, torch.device("cpu")).tolist()


def test_rows_of_equal_sequences_are_met_at_other_positions():
    positions = [row % 1024 for row in range(1 << 20)[spread(1 << 20, 16)]]
    assert len(set(positions)) == len(positions)
    assert 0 not in positions


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_taken_rows_decode_as_they_did(granularity):
    q = octavo.quantize(torch.randn(20, 70), E4M3, granularity=granularity)
    for rows in (slice(None), slice(2, None, 3), slice(19, None, 1), slice(1, None, 5)):
        assert torch.equal(take_rows(q, rows).dequantize(), q.dequantize()[rows])


def product(left, right, accumulate=Accumulate.FP32, granularity=None):
    a, b = (octavo.quantize(side, E4M3, granularity=granularity) for side in (left, right))
    return [a, b], product_sums(a, b, (left, right), accumulate)


@pytest.mark.parametrize("accumulate", Accumulate)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 32), PerBlock(1, 1000)], ids=str)
def test_a_product(granularity, native, accumulate, monkeypatch):
    if not native:
        monkeypatch.setattr(native_statistics, "sums", lambda *_: False)
    left, right = torch.randn(12, 300).bfloat16(), torch.randn(9, 300) + 0.5
    made, sums = product(left, right, accumulate, granularity)
    wanted = left.double().numpy() @ right.double().numpy().T
    values = [side.data.double().numpy() * scales_of(side).astype(np.float64) for side in made]
    exact = values[0] @ values[1].T
    np.testing.assert_allclose(sums[0], (wanted**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums[1], ((exact - wanted) ** 2).sum(), rtol=1e-3)
    np.testing.assert_allclose(sums[2], np.abs(exact).sum(), rtol=1e-5)
    found = dict(zip(PRODUCT_FIELDS, product_numbers(sums.numpy()), strict=True))
    assert found["sqnr_db"] == pytest.approx(10 * np.log10((wanted**2).sum() / ((exact - wanted) ** 2).sum()), abs=0.01)
    if accumulate is Accumulate.FP32 or isinstance(granularity, PerBlock):
        assert math.isnan(found["accumulation_bias"])
        return
    cut = scaled_mm(*made, out_dtype=torch.float32, accumulate=accumulate)
    bias = (np.sign(exact) * (cut.double().numpy() - exact)).sum() / np.abs(exact).sum()
    assert found["accumulation_bias"] == pytest.approx(bias, abs=1e-6)


def test_sums_of_one_sign_lose_a_part():
    left, right = torch.rand(8, 4096), torch.rand(8, 4096)
    _, fast = product(left, right, Accumulate.HOPPER_FAST)
    _, slow = product(left, right, Accumulate.HOPPER_SLOW)
    biases = [product_numbers(sums.numpy())[1] for sums in (fast, slow)]
    assert -0.12 < biases[0] < -0.02 < biases[1] < 0


def test_autocast_leaves_the_wanted_product_alone(monkeypatch):
    left, right = torch.randn(8, 64), torch.randn(8, 64)
    for native in (True, False):
        monkeypatch.setattr(native_statistics, "sums", lambda *_, native=native: native)
        _, alone = product(left, right)
        with torch.autocast("cpu", torch.bfloat16):
            _, around = product(left, right)
        assert torch.equal(alone[:3], around[:3])


def test_a_product_without_noise_or_signal_has_no_ratio():
    numbers = product_numbers(np.array([[4.0, 0.0, 4.0, 0.0], [0.0, 4.0, 4.0, 0.0], [0.0] * 4]))
    assert np.isnan(numbers[:, 0]).all()
    assert numbers[:2, 1].tolist() == [0, 0]


def test_a_field_for_every_number():
    assert cast_numbers(np.ones((4, 5, len(CAST_SUMS)))).shape == (4, 5, len(CAST_FIELDS))
    if not native_bindings.why_absent():
        assert len(CAST_SUMS) == native_bindings.extension().CAST_SUMS + 1
        assert len(PRODUCT_SUMS) == native_bindings.extension().COMPARISON_SUMS
