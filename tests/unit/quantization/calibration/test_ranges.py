"""Each method against a slow search on the tensor itself, with no histogram between."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import octavo
from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.numerics import ScaleRounding, scale_from_amax
from octavo.numerics.scaling import smallest_scaled_amax
from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts
from octavo.quantization.calibration.ranges import Method, RangeRule, scale_from_magnitudes

BIN = 2.0**-6  # a bin is this wide, relative to its value
FIRST = 2.0**-133  # what is smaller lies in the bin that stands for zero


def magnitudes(x):
    counts = MagnitudeCounts()
    counts.add(x)
    return counts.magnitudes()


def found(x, method, **options):
    return scale_from_magnitudes(magnitudes(x), RangeRule(method=Method(method), **options), E4M3)


def tried_scales(x, rounding="fp32"):
    """The scale of each candidate range, the widest first."""
    return [
        scale_from_amax(torch.tensor(x.abs().max().item() * 2 ** (-i / 16)), E4M3, rounding=ScaleRounding(rounding))
        for i in range(65)
    ]


def squared_error(x, scale):
    y = octavo.quantize(x, E4M3, scale=scale).dequantize()
    return math.fsum((a - b) ** 2 for a, b in zip(x.tolist(), y.tolist(), strict=True))


def tensors(seed, size=300):
    """Gaussian, log-normal, with an outlier, with most of it in the subnormals."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(size, generator=generator)
    yield base
    yield torch.exp(3 * base)
    yield torch.cat([base, torch.tensor([3e3])])
    yield torch.cat([base * 1e-3, torch.tensor([2.0] * 3)])
    yield torch.cat([base.repeat(30) * 2.0**-13, torch.tensor([2.0**-6] * 5)])


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("seed", range(3))
def test_max_is_the_tensors_own_scale_bitwise(kind, seed):
    x = list(tensors(seed))[kind]
    assert torch.equal(found(x, "max"), octavo.quantize(x, E4M3).scale)
    expected = octavo.quantize(x, E4M3, scale_rounding=ScaleRounding.RCEIL).scale
    assert torch.equal(found(x, "max", power_of_two=True), expected)
    assert math.log2(expected).is_integer()


@pytest.mark.parametrize("rounding", ["fp32", "rceil"])
@pytest.mark.parametrize("kind", range(5))
def test_mse_is_the_brute_force_search_where_bins_hold_one_value(kind, rounding):
    """Values of six mantissa bits are kept exactly, so the same candidate must win."""
    for seed in range(3):
        bits = list(tensors(seed))[kind].view(torch.int32)
        x = (bits & ~((1 << 17) - 1)).view(torch.float32)
        scales = tried_scales(x, rounding)
        errors = [squared_error(x, scale) for scale in scales]
        best = scales[errors.index(min(errors))]
        assert torch.equal(found(x, "mse", power_of_two=rounding == "rceil"), best)


@pytest.mark.parametrize("kind", range(5))
def test_mse_costs_no_more_than_a_bins_width_elsewhere(kind):
    for seed in range(3):
        x = list(tensors(seed))[kind]
        best = min(squared_error(x, scale) for scale in tried_scales(x))
        # A value moves by half a bin at most, a 16th of half an FP8 step: Σ(e + d)² <= Σe² + 2·sqrt(Σe²·Σd²) + Σd².
        slack = math.fsum((abs(v) * BIN / 2) ** 2 for v in x.tolist())
        assert squared_error(x, found(x, "mse")) <= (math.sqrt(best) + 2 * math.sqrt(slack)) ** 2
        assert squared_error(x, found(x, "mse")) <= 1.03 * best


def test_clipping_pays_only_where_it_lifts_the_bulk_out_of_the_subnormals():
    gaussian, _, outlier, *_ = tensors(0)
    for x in (gaussian, outlier):
        assert squared_error(x, found(x, "max")) < 1.26 * squared_error(x, found(x, "mse"))  # 1 dB
    counts = MagnitudeCounts()
    counts.add(gaussian * 2.0**-16)
    counts.counts *= 2**40  # only a bulk this large has the energy of the one outlier
    counts.add(torch.tensor([1.0]))
    clipping, whole = (
        scale_from_magnitudes(counts.magnitudes(), RangeRule(method=m), E4M3) for m in (Method.MSE, Method.MAX)
    )
    assert clipping < whole / 8


@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60), percentile=st.sampled_from([50, 90, 99.9])
)
@example(values=[1.0, 2.0**-149], percentile=50)
@example(values=[9280.0, 9280.0, 9407.0], percentile=50)
@settings(max_examples=100, deadline=None)
def test_percentile_is_the_quantile_within_a_bin(values, percentile):
    x = torch.tensor(values)
    rank = math.ceil(len(values) * percentile / 100)
    ordered = [each if each >= FIRST else 0.0 for each in sorted(x.abs().tolist())]
    expected = max(ordered[rank - 1] or float(x.abs().max()), smallest_scaled_amax(E4M3))
    got = float(found(x, "percentile", percentile=percentile)) * E4M3.max
    if x.abs().max() > 0:
        beyond = got / expected - 1  # upwards a whole bin, where amax stands for the last one
        assert -BIN / 2 - 1e-6 <= beyond <= BIN + 1e-6


def test_percentile_of_many_is_torchs_quantile_within_a_bin():
    x = torch.exp(2 * torch.randn(50_001, generator=torch.Generator().manual_seed(0)))
    for percentile in (50.0, 99.0, 99.9):
        expected = torch.quantile(x.double(), percentile / 100).item()
        got = float(found(x, "percentile", percentile=percentile)) * E4M3.max
        assert got == pytest.approx(expected, rel=BIN / 2 + 1e-3)  # and the distance to the next element


def test_percentile_100_is_max_and_mostly_zeros_are_no_range():
    x = torch.randn(1000)
    assert torch.equal(found(x, "percentile", percentile=100), found(x, "max"))
    sparse = torch.zeros(100_000)
    sparse[3] = 5.0
    assert torch.equal(found(sparse, "percentile"), found(sparse, "max"))


def slow_divergence(x, limit, scale):
    """KL(P ‖ Q) as its definition reads, over a histogram of the tensor's nonzeros made with dictionaries."""
    bins: dict[int, int] = {}
    for bits in x[x != 0].abs().view(torch.int32).tolist():
        bins[(bits + 2**16) >> 17] = bins.get((bits + 2**16) >> 17, 0) + 1
    amax = x.abs().max().item()

    def as_float(bits):
        return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()

    table = []  # value, width, count
    for index in sorted(bins):
        value = amax if index == max(bins) else as_float(index << 17)
        table.append((value, as_float((index << 17) + 2**16) - as_float((index << 17) - 2**16), bins[index]))
    inside = [row for row in table if row[0] <= limit]
    if not inside:
        return math.inf
    outliers = sum(row[2] for row in table if row[0] > limit)
    total, kept = sum(row[2] for row in table), sum(row[2] for row in inside)
    levels: dict[float, list[tuple[float, float, int]]] = {}
    codes = octavo.quantize(torch.tensor([row[0] for row in inside]), E4M3, scale=scale).data.float()
    for level, row in zip(codes.tolist(), inside, strict=True):
        levels.setdefault(level, []).append(row)
    divergence = 0.0
    for rows in levels.values():
        mass, width = sum(row[2] for row in rows), sum(row[1] for row in rows)
        for row in rows:
            p = (row[2] + (outliers if row is inside[-1] else 0)) / total
            q = mass / width * row[1] / kept
            divergence += p * math.log(p / q)
    return divergence


@pytest.mark.parametrize("kind", range(5))
def test_entropy_is_the_slow_search(kind):
    x = list(tensors(kind, size=120))[kind]
    ranges = [x.abs().max().item() * 2 ** (-i / 16) for i in range(65)]
    scales = tried_scales(x)
    losses = [
        slow_divergence(x, torch.tensor(limit).item(), scale) for limit, scale in zip(ranges, scales, strict=True)
    ]
    chosen = float(found(x, "entropy"))
    index = next(i for i, scale in enumerate(scales) if float(scale) == chosen)
    assert losses[index] <= min(losses) + 1e-12


@pytest.mark.parametrize("method", list(Method))
def test_zeros_get_scale_1(method):
    assert found(torch.zeros(7), method).item() == 1.0
    assert scale_from_magnitudes(MagnitudeCounts().magnitudes(), RangeRule(method=method), E4M3).item() == 1.0


@pytest.mark.parametrize("method", list(Method))
def test_every_scale_is_positive_and_finite(method):
    for x in (torch.tensor([torch.finfo(torch.float32).max, 1.0]), torch.tensor([1e-44]), torch.tensor([1e-20, 1e-21])):
        scale = found(x, method)
        assert scale.shape == ()
        assert scale.dtype is torch.float32
        assert 0 < scale.item() < math.inf


@pytest.mark.parametrize(("given", "words"), [
    ({"method": "median"}, "method must be one of max, percentile, mse, entropy, not 'median'"),
    ({"percentile": 0}, "percentile must be above 0 and at most 100, not 0"),
    ({"percentile": 100.1}, "at most 100, not 100.1"),
    ({"percentile": math.nan}, "not nan"),
])  # fmt: skip
def test_bad_rules_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        RangeRule(**given)
