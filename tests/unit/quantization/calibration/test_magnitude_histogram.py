import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.quantization.calibration.magnitude_histogram import BINS, MagnitudeCounts, values_of_bins

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def counted(*tensors):
    counts = MagnitudeCounts()
    for x in tensors:
        counts.add(x)
    return counts.magnitudes()


def rounded(x):
    """A magnitude to six mantissa bits below its leading one, ties away from zero, by rational arithmetic."""
    value = Fraction(abs(x))
    if not value:
        return 0.0
    exponent = max(math.frexp(float(value))[1] - 1, -126)
    step = Fraction(2) ** (exponent - 6)
    return float(math.floor(value / step + Fraction(1, 2)) * step)


@pytest.mark.long
@given(st.lists(FLOATS, min_size=1, max_size=40))
@settings(max_examples=200)
def test_every_magnitude_is_counted_at_six_bits(values):
    x = torch.tensor(values, dtype=torch.float32)
    found = counted(x)
    assert found.amax == x.abs().max()
    expected: dict[float, int] = {}
    for value in x.tolist():
        expected[rounded(value)] = expected.get(rounded(value), 0) + 1
    top = max(expected)
    expected[found.amax] = expected.pop(top)
    got = dict(zip(found.values.tolist(), found.counts.tolist(), strict=True))
    largest = torch.finfo(torch.float32).max
    assert got == {min(value, largest): n for value, n in sorted(expected.items())}


def test_amax_and_counts_do_not_depend_on_order_or_batches():
    torch.manual_seed(1)
    x = torch.randn(999, 7) * torch.exp(4 * torch.randn(999, 7))
    whole = counted(x)
    parts = counted(*x[torch.randperm(999)].split(100))
    assert whole.amax == parts.amax == x.abs().max()
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.counts, parts.counts)
    assert whole.total == x.numel()


def test_merging_is_counting_both():
    x, y = torch.randn(50), torch.randn(60) * 3
    one, other = MagnitudeCounts(), MagnitudeCounts()
    one.add(x)
    other.add(y)
    one.merge(other)
    found, expected = one.magnitudes(), counted(x, y)
    assert found.amax == expected.amax
    assert torch.equal(found.counts, expected.counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_counted_as_their_float32_values(dtype):
    x = torch.randn(30, 4).to(dtype)
    found, expected = counted(x.t()), counted(x.float())
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.counts, expected.counts)


def test_bins_hold_what_rounds_to_their_value_and_their_widths_add_up():
    found = counted(torch.logspace(-3, 3, 20000, base=2.0))
    edges = found.values[1:-1] + found.widths[1:-1] / 2  # but at powers of two, where the lower half is narrower
    assert (edges[1:] - edges[:-1] - found.widths[2:-1]).abs().max() < 2**-6
    assert math.isclose(float(found.widths[1:-1].sum()), 8 - 1 / 8, rel_tol=0.02)


def test_energy_and_rms_are_those_of_the_elements():
    x = torch.randn(5000)
    found = counted(x)
    assert math.isclose(found.energy, float(x.double().square().sum()), rel_tol=1e-3)
    assert math.isclose(found.rms, float(x.double().square().mean().sqrt()), rel_tol=1e-3)


def test_empty_tensor_has_zero_counts_and_integers_are_refused():
    found = counted(torch.empty(0, 4))
    assert (found.amax, found.total, found.rms, len(found.values)) == (0.0, 0, 0.0, 0)
    with pytest.raises(ConfigError, match="the tensor to count"):
        MagnitudeCounts().add(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_nonfinite_elements_make_the_amax_nonfinite(bad):
    counts = MagnitudeCounts()
    counts.add(torch.ones(3))
    counts.add(torch.tensor([1.0, bad, 2.0], dtype=torch.float64))
    counts.add(torch.ones(3))
    assert not counts.amax.isfinite()


def test_the_last_bin_is_the_largest_float32():
    largest = torch.finfo(torch.float32).max
    assert values_of_bins(torch.tensor([BINS - 1])).item() == largest
    assert counted(torch.tensor([largest])).values.tolist() == [largest]
