"""The scalar reference against gfloat, ml_dtypes and numpy: all codes of every format, and all kinds of rounding."""

import math
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest

from octavo.formats import BF16, E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, E8M0, FP8_FORMATS, FP16, FP32, Format
from octavo.numerics.reference import decode, encode
from tests.oracle.rounding_table import ML_DTYPES, float32_edges

GFLOAT = {
    E4M3: gfloat.formats.format_info_ocp_e4m3,
    E5M2: gfloat.formats.format_info_ocp_e5m2,
    E8M0: gfloat.formats.format_info_ocp_e8m0,
}
NUMPY: dict[Format, Any] = {**ML_DTYPES, E8M0: ml_dtypes.float8_e8m0fnu, FP16: np.float16, BF16: ml_dtypes.bfloat16}


def all_codes(fmt: Format) -> np.ndarray:
    return np.arange(1 << fmt.bits, dtype=np.uint8 if fmt.bits == 8 else np.uint16)


def values_of(fmt: Format) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return all_codes(fmt).view(NUMPY[fmt]).astype(np.float64)


def same(got: float, wanted: float) -> bool:
    if math.isnan(wanted):
        return math.isnan(got)
    return got == wanted and math.copysign(1, got) == math.copysign(1, wanted)


@pytest.mark.parametrize("fmt", NUMPY, ids=str)
def test_decode_equals_numpy_and_ml_dtypes_at_every_code(fmt):
    wanted = values_of(fmt).tolist()
    wrong = [code for code in all_codes(fmt).tolist() if not same(decode(code, fmt), wanted[code])]
    assert not wrong


def test_decode_equals_numpy_at_random_float32_codes():
    codes = np.random.default_rng(0).integers(0, 1 << 32, 4000, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        wanted = codes.view(np.float32).astype(np.float64).tolist()
    assert not [code for code, peer in zip(codes.tolist(), wanted, strict=True) if not same(_decode32(code), peer)]


def _decode32(code: int) -> float:
    """``decode`` without FP32's tuple of 16 million NaN codes."""
    return decode(code, FP32) if code & FP32.magnitude_mask <= FP32.max_code + 1 else math.nan


@pytest.mark.parametrize("fmt", GFLOAT, ids=str)
def test_decode_equals_gfloat_at_every_code(fmt):
    wrong = [code for code in range(256) if not same(decode(code, fmt), gfloat.decode_float(GFLOAT[fmt], code).fval)]
    assert not wrong


@pytest.mark.parametrize("fmt", [*FP8_FORMATS, FP16, BF16], ids=str)
def test_encode_returns_the_code_of_every_value(fmt):
    step = 1 if fmt.bits == 8 else 7  # 16-bit: a seventh of the codes, all binades
    codes = [code for code in range(0, 1 << fmt.bits, step) if not math.isnan(decode(code, fmt))]
    assert [encode(decode(code, fmt), fmt) for code in codes] == codes


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("saturate", [True, False])
def test_encode_equals_gfloat_around_every_value_and_midpoint(fmt, saturate):
    x = float32_edges(fmt)
    for value in x[np.isfinite(x)].tolist():
        rounded = gfloat.round_float(GFLOAT[fmt], value, gfloat.RoundMode.TiesToEven, sat=saturate)
        assert same(decode(encode(value, fmt, saturate=saturate), fmt), rounded), value


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_encode_without_saturation_equals_ml_dtypes(fmt):
    x = float32_edges(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(ML_DTYPES[fmt]).astype(np.float64).tolist()
    for value, peer in zip(x.tolist(), wanted, strict=True):
        assert same(decode(encode(value, fmt, saturate=False), fmt), peer), value


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
def test_16_bit_rounding_equals_numpy_around_values_and_midpoints(fmt):
    codes = all_codes(fmt)[: fmt.max_code : 37]
    values = codes.view(NUMPY[fmt]).astype(np.float64)
    above = (codes + 1).view(NUMPY[fmt]).astype(np.float64)
    middles = ((values + above) / 2).astype(np.float32)
    points = np.concatenate([values.astype(np.float32), middles])
    x = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    with np.errstate(over="ignore"):
        wanted = (-x).astype(NUMPY[fmt]).astype(np.float64).tolist()
    for value, peer in zip((-x).tolist(), wanted, strict=True):
        assert same(decode(encode(value, fmt, saturate=False), fmt), peer), value


def test_float32_rounding_equals_numpy():
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(2000) * 2.0 ** rng.integers(-152, 130, 2000)
    with np.errstate(over="ignore", under="ignore"):
        wanted = exact.astype(np.float32).astype(np.float64).tolist()
    for value, peer in zip(exact.tolist(), wanted, strict=True):
        assert same(decode(encode(value, FP32, saturate=False), FP32), peer), value


@pytest.mark.parametrize(
    ("fmt", "value", "saturated", "unsaturated"),
    [
        (E4M3, 464.0, 448.0, 448.0),  # a tie, to the even 448
        (E4M3, 464.00003, 448.0, math.nan),
        (E5M2, 61439.996, 57344.0, 57344.0),
        (E5M2, 61440.0, 57344.0, math.inf),  # a tie, away from the odd 57344
        (E4M3_FNUZ, 247.99998, 240.0, 240.0),
        (E4M3_FNUZ, 248.0, 240.0, math.nan),
        (E5M2_FNUZ, 61439.996, 57344.0, 57344.0),
        (E5M2_FNUZ, 61440.0, 57344.0, math.nan),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_begins_where_rounding_passes_the_maximum(fmt, value, saturated, unsaturated, sign):
    assert same(decode(encode(sign * value, fmt), fmt), sign * saturated)
    assert same(decode(encode(sign * value, fmt, saturate=False), fmt), sign * unsaturated)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_infinities_and_nan(fmt):
    has_infinity = fmt is E5M2
    for sign in (1, -1):
        propagated = decode(encode(sign * math.inf, fmt), fmt)
        assert same(propagated, sign * math.inf if has_infinity else math.nan)
        assert decode(encode(sign * math.inf, fmt, propagate_inf=False), fmt) == sign * fmt.max
    assert math.isnan(decode(encode(math.nan, fmt), fmt))
