"""The scalar reference at the points its text names; its peers: tests/oracle/test_reference_against_peers.py."""

import math
from fractions import Fraction

import pytest

from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, E8M0, FP8_FORMATS
from octavo.numerics.reference import decode, encode, encode_stochastic

every_format = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)


@pytest.mark.parametrize(
    ("fmt", "code", "value"),
    [
        (E4M3, 0x01, 2.0**-9),
        (E4M3, 0x38, 1.0),
        (E4M3, 0xFE, -448.0),
        (E5M2, 0x3C, 1.0),
        (E5M2, 0x7C, math.inf),
        (E5M2, 0xFC, -math.inf),
        (E4M3_FNUZ, 0x40, 1.0),
        (E5M2_FNUZ, 0x40, 1.0),
        (E8M0, 0x00, 2.0**-127),
        (E8M0, 0x7F, 1.0),
        (E8M0, 0xFE, 2.0**127),
    ],
)
def test_decode(fmt, code, value):
    assert decode(code, fmt) == value


@pytest.mark.parametrize("fmt", [*FP8_FORMATS, E8M0], ids=str)
def test_decode_nan(fmt):
    assert all(math.isnan(decode(code, fmt)) for code in fmt.nan_codes)


@every_format
def test_signed_zero(fmt):
    assert encode(0.0, fmt) == 0
    assert encode(-0.0, fmt) == (0 if fmt.name.endswith("FNUZ") else 0x80)
    assert encode(-1e-30, fmt) == encode(-0.0, fmt)


@every_format
def test_ties_go_to_the_even_code(fmt):
    for code in range(fmt.max_code):
        tie = (fmt.magnitude(code) + fmt.magnitude(code + 1)) / 2
        assert encode(tie, fmt) == code + code % 2


@every_format
def test_stochastic_rounding_moves_up_at_the_dropped_fraction(fmt):
    for code in range(fmt.max_code):
        low, high = fmt.magnitude(code), fmt.magnitude(code + 1)
        quarter = low + (high - low) / 4
        assert encode_stochastic(quarter, fmt, uniform=Fraction(3, 4)) == code + 1
        assert encode_stochastic(quarter, fmt, uniform=Fraction(3, 4) - Fraction(1, 2**30)) == code
        assert encode_stochastic(low, fmt, uniform=1 - Fraction(1, 2**30)) == code


@every_format
def test_stochastic_rounding_keeps_to_the_maximum(fmt):
    assert encode_stochastic(-1.01 * fmt.max, fmt, uniform=Fraction(99, 100)) == fmt.max_code | 0x80
