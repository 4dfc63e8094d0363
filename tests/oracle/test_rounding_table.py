"""The table that the cast is compared with, itself compared with the scalar reference at every point where it bends."""

import math

import numpy as np
import pytest
import torch

from octavo.formats import FP8_FORMATS
from octavo.numerics import Nonfinite, Overflow
from octavo.numerics.reference import decode, encode
from tests.oracle.rounding_table import assert_same_codes, expected_codes, float32_edges, rounding_table


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
@pytest.mark.parametrize("overflow", Overflow)
@pytest.mark.parametrize("nonfinite", Nonfinite)
def test_table_equals_reference_around_every_value_and_midpoint(fmt, overflow, nonfinite):
    x = float32_edges(fmt)
    saturate, propagate = overflow is Overflow.SATURATE, nonfinite is Nonfinite.PROPAGATE
    table = expected_codes(x, fmt, overflow=overflow, nonfinite=nonfinite).tolist()
    reference = [encode(value, fmt, saturate=saturate, propagate_inf=propagate) for value in x.tolist()]
    for value, got, wanted in zip(x.tolist(), table, reference, strict=True):
        assert got == wanted or (math.isnan(decode(got, fmt)) and math.isnan(decode(wanted, fmt))), value


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_table_has_every_magnitude(fmt):
    table = rounding_table(fmt)
    assert table.values.tolist() == [decode(code, fmt) for code in range(fmt.max_code + 1)]
    assert (np.diff(table.values) > 0).all()
    assert len(table.midpoints) == len(table.values)


def test_comparison_sees_one_wrong_code():
    fmt = FP8_FORMATS[0]
    expected = np.arange(256, dtype=np.uint8)
    actual = torch.arange(256, dtype=torch.uint8)
    assert_same_codes(actual, expected, fmt)
    actual[17] = 18
    with pytest.raises(AssertionError, match="1 codes differ, first at 17"):
        assert_same_codes(actual, expected, fmt)
