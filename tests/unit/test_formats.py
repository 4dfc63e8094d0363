"""Every constant of every format against the published tables, and a count over ml_dtypes' and numpy's values."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import (
    BF16,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    E8M0,
    FORMATS,
    FP8_FORMATS,
    FP16,
    FP32,
    Format,
    format_of,
)

# OCP FP8 1.0 table 1, OCP MX 1.0 section 5.4 and arXiv 2206.02915: bias, maximum, smallest normal and subnormal.
PUBLISHED = {
    E4M3: (7, 448.0, 2.0**-6, 2.0**-9),
    E5M2: (15, 57344.0, 2.0**-14, 2.0**-16),
    E4M3_FNUZ: (8, 240.0, 2.0**-7, 2.0**-10),
    E5M2_FNUZ: (16, 57344.0, 2.0**-15, 2.0**-17),
    E8M0: (127, 2.0**127, 2.0**-127, None),
    FP16: (15, 65504.0, 2.0**-14, 2.0**-24),
    BF16: (127, 255 * 2.0**120, 2.0**-126, 2.0**-133),
    FP32: (127, (2.0**24 - 1) * 2.0**104, 2.0**-126, 2.0**-149),
}
PUBLISHED_CODES = {
    E4M3: (0x7E, (), (0x7F, 0xFF)),
    E5M2: (0x7B, (0x7C, 0xFC), (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    E4M3_FNUZ: (0x7F, (), (0x80,)),
    E5M2_FNUZ: (0x7F, (), (0x80,)),
    E8M0: (0xFE, (), (0xFF,)),
}
PEERS: dict[Format, Any] = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3_FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2_FNUZ: ml_dtypes.float8_e5m2fnuz,
    E8M0: ml_dtypes.float8_e8m0fnu,
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
}


def peer_values(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8 if fmt.bits == 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes.view(PEERS[fmt]).astype(np.float64)


def test_every_format_is_listed_once():
    assert set(FORMATS) == PUBLISHED.keys()
    assert len({fmt.name for fmt in FORMATS}) == len(FORMATS)
    assert FP8_FORMATS == (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_constants_are_the_published_ones(fmt):
    assert (fmt.bias, fmt.max, fmt.min_normal, fmt.min_subnormal) == PUBLISHED[fmt]


@pytest.mark.parametrize("fmt", PUBLISHED_CODES, ids=str)
def test_special_codes_are_the_published_ones(fmt):
    assert (fmt.max_code, fmt.inf_codes, fmt.nan_codes) == PUBLISHED_CODES[fmt]


@pytest.mark.parametrize("fmt", PEERS, ids=str)
def test_special_codes_are_the_peers(fmt):
    values = peer_values(fmt)
    assert fmt.nan_codes == tuple(np.flatnonzero(np.isnan(values)).tolist())
    assert fmt.inf_codes == tuple(np.flatnonzero(np.isinf(values)).tolist())
    assert fmt.max == values[np.isfinite(values)].max()


@pytest.mark.parametrize("fmt", PEERS, ids=str)
def test_magnitudes_are_the_peers(fmt):
    values = peer_values(fmt)
    assert [fmt.magnitude(code) for code in range(fmt.max_code + 1)] == values[: fmt.max_code + 1].tolist()


@pytest.mark.parametrize("fmt", PEERS, ids=str)
def test_counts_equal_a_count_over_all_codes(fmt):
    finite = np.unique(peer_values(fmt)[np.isfinite(peer_values(fmt))])
    positive = finite[finite > 0]
    assert fmt.distinct_finite_values == len(finite)
    assert fmt.binades == len(np.unique(np.floor(np.log2(positive))))


@pytest.mark.parametrize(
    ("fmt", "count"), [(E4M3, 253), (E5M2, 247), (E4M3_FNUZ, 255), (E5M2_FNUZ, 255), (E8M0, 255), (FP32, 4278190079)]
)
def test_distinct_finite_values(fmt, count):
    assert fmt.distinct_finite_values == count


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_epsilon_is_the_step_after_one(fmt):
    dtype = PEERS.get(fmt, np.float32)
    assert fmt.epsilon == float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_torch_agrees_on_width_and_maximum(fmt):
    info = torch.finfo(fmt.torch_dtype)
    assert (fmt.bits, fmt.max) == (info.bits, info.max)
    assert fmt.min_normal == info.smallest_normal


@pytest.mark.parametrize(("fmt", "top", "others"), [(E4M3, 7, 8), (E5M2, 4, 4)], ids=str)
def test_values_in_a_binade(fmt, top, others):
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    last = math.floor(math.log2(fmt.max))
    assert sum(2.0**last <= value for value in values) == top
    assert sum(2.0 ** (last - 1) <= value < 2.0**last for value in values) == others


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bits_add_up(fmt):
    assert fmt.bits == fmt.sign_bits + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.sign_mask | fmt.magnitude_mask == (1 << fmt.bits) - 1
    assert fmt.sign_mask & fmt.magnitude_mask == 0


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_format_of_finds_the_row_of_a_dtype(fmt):
    assert format_of(fmt.torch_dtype) is fmt


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_format_of_refuses_other_dtypes(dtype):
    with pytest.raises(ConfigError, match=rf"{dtype} is not a number format octavo knows; use one of torch.float32, "):
        format_of(dtype)


def test_a_format_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.exponent_bits = 5  # type: ignore[misc]


def test_a_format_prints_its_name():
    assert f"{E4M3} {E5M2_FNUZ}" == "E4M3 E5M2_FNUZ"
