"""Hopper's sums by the native kernel, bit for bit: against octavo's own definition and mmaemu, at every level."""

import itertools

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import native_bindings, native_gemm
from octavo.kernels.dispatch import scaled_mm
from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor, QuantizedTensor
from octavo.numerics.accumulate import CHAIN, Accumulate, hopper_chains, hopper_sums

pytestmark = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)

HOPPER = (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW)
PAIRS = tuple(itertools.product((E4M3, E5M2), repeat=2))
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 300, 1000)  # of K: around steps of 32 and chains of 128

every_pair = pytest.mark.parametrize(("fmt_a", "fmt_b"), PAIRS, ids=lambda fmt: fmt.name)
every_way = pytest.mark.parametrize("how", HOPPER)


def random_codes(rows: int, k: int, fmt: Format, *, first: int = 0, last: int = 255) -> Tensor:
    """Codes whose magnitudes lie in a range, of both signs."""
    last = min(last, fmt.magnitude_mask)
    magnitudes = torch.randint(first, last + 1, (rows, k), dtype=torch.uint8)
    return (magnitudes | torch.randint(0, 2, (rows, k), dtype=torch.uint8) << 7).view(fmt.torch_dtype)


def finite_codes(rows: int, k: int, fmt: Format) -> Tensor:
    return random_codes(rows, k, fmt, last=fmt.max_code)


def turned(codes: Tensor) -> Tensor:
    """The same matrix, its columns side by side in memory."""
    return codes.view(torch.uint8).t().contiguous().t().view(codes.dtype)


def assert_same_bits(actual: Tensor, expected: Tensor, note: str = "") -> None:
    """The sign and payload of a NaN apart."""
    assert (actual.dtype, actual.shape) == (torch.float32, expected.shape)
    different = actual.view(torch.int32) != expected.view(torch.int32)
    different &= ~(actual.isnan() & expected.isnan())
    assert not different.any(), f"{note}: {actual[different][:4].tolist()} is not {expected[different][:4].tolist()}"


def assert_definition(a: Tensor, b: Tensor, how: Accumulate) -> None:
    expected = hopper_sums(a, b, accumulate=how)
    for level in native_bindings.levels():
        assert_same_bits(native_gemm.hopper_sums(a, b, accumulate=how, level=level), expected, level)


@every_pair
@every_way
def test_every_pair_of_codes_alone(fmt_a, fmt_b, how):
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    assert_definition(codes.view(fmt_a.torch_dtype), codes.view(fmt_b.torch_dtype), how)


@every_pair
@every_way
def test_every_pair_of_codes_beside_others(fmt_a, fmt_b, how):
    """Two products and a total: all are aligned to the largest of three exponents."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    for beside, earlier in ((0x29, 0x21), (0x01, 0x45), (0x70, 0x00), (0x07, 0x02)):
        row = torch.zeros(256, 40, dtype=torch.uint8)
        row[:, 3], row[:, 35:36], row[:, 38] = earlier, codes, beside
        assert_definition(row.view(fmt_a.torch_dtype), row.view(fmt_b.torch_dtype), how)


@pytest.mark.parametrize("k", LENGTHS)
@every_pair
@every_way
def test_random_codes(k, fmt_a, fmt_b, how):
    assert_definition(random_codes(9, k, fmt_a), random_codes(70, k, fmt_b), how)
    assert_definition(finite_codes(9, k, fmt_a), finite_codes(70, k, fmt_b), how)
    assert_definition(finite_codes(70, k, fmt_a), random_codes(9, k, fmt_b), how)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 200), (7, 15), (8, 16), (9, 17), (65, 33), (130, 64), (0, 5), (5, 0)])
@every_way
def test_ragged_shapes_and_layouts(m, n, how):
    a, b = finite_codes(m, 161, E4M3), finite_codes(n, 161, E5M2)
    assert_definition(a, b, how)
    assert_definition(turned(a), b, how)
    assert_definition(a, turned(b), how)
    assert_definition(a[:, 3:140], turned(b)[:, 3:140], how)
    assert_definition(a[:, 1::2], b[:, ::2][:, 1:], how)


@every_pair
@every_way
def test_ranges_of_magnitudes(fmt_a, fmt_b, how):
    """Subnormals alone, large beside small, and equal exponents, where sums cancel."""
    normal = 1 << fmt_a.mantissa_bits
    ranges = ((0, normal), (normal, 2 * normal), (0x38, 0x38 + normal), (0x38, 0x38), (0, 0x20), (0x60, fmt_a.max_code))
    for (first, last), (other_first, other_last) in itertools.product(ranges, repeat=2):
        a = random_codes(5, 200, fmt_a, first=first, last=last)
        b = random_codes(40, 200, fmt_b, first=other_first, last=min(other_last, fmt_b.max_code))
        assert_definition(a, b, how)


@every_pair
@every_way
def test_totals_far_from_the_products(fmt_a, fmt_b, how):
    """A total that swallows what follows, one that is swallowed, and one that is cancelled to zero."""
    large, small = torch.tensor([fmt_a.max]), torch.tensor([fmt_a.min_subnormal])
    for first, then in ((large, small), (small, large), (large, -large), (small, -small)):
        values = torch.cat([first.expand(4, 32), then.expand(4, 32), small.expand(4, 100)], dim=1)
        assert_definition(values.to(fmt_a.torch_dtype), finite_codes(40, 164, fmt_b), how)
        assert_definition(values.to(fmt_a.torch_dtype), torch.ones(40, 164).to(fmt_b.torch_dtype), how)


@every_way
def test_nan_and_infinities_stay_in_their_rows_and_columns(how):
    for k in (5, 127, 200, 290):
        a, b = finite_codes(30, 300, E5M2), finite_codes(70, 300, E5M2)
        a[4, k], a[7, k], b[9, k] = torch.inf, -torch.inf, torch.nan
        b[40, k], b[41, k], b[41, 299] = 0, torch.inf, -torch.inf
        assert_definition(a, b, how)
        assert native_gemm.hopper_sums(a, b, accumulate=how).isfinite().sum() == 28 * 68


@pytest.mark.parametrize("k", [96, 1000])
@every_pair
@every_way
def test_mmaemu(k, fmt_a, fmt_b, how):
    mmaemu = pytest.importorskip("mmaemu", reason="mmaemu is not installed: its model of an H100 cannot be compared")
    for a, b in (
        (random_codes(6, k, fmt_a), random_codes(40, k, fmt_b)),
        (torch.randn(6, k).to(fmt_a.torch_dtype), torch.randn(40, k).abs().to(fmt_b.torch_dtype)),
    ):
        fast = how is Accumulate.HOPPER_FAST
        expected = mmaemu.accumulate(a, b, use_fast_accum=fast, profile="hopper", splitk=1, backend="reference")
        for level in native_bindings.levels():
            assert_same_bits(native_gemm.hopper_sums(a, b, accumulate=how, level=level), expected, level)


@pytest.mark.parametrize("k", LENGTHS)
def test_scaled_chains(k):
    """Scales of every size, one for each chain or one for all, beside codes that need not be finite."""
    a, b, chains = finite_codes(20, k, E4M3), random_codes(40, k, E5M2, last=0x7C), -(-k // CHAIN)
    for left, right in (((20, chains), (40, chains)), ((1, 1), (40, chains)), ((20, 1), (1, 1))):
        a_scale, b_scale = (torch.exp2(torch.randn(shape) * 30) for shape in (left, right))
        expected = torch.zeros(20, 40)
        for i, chain in enumerate(hopper_chains(a, b)):
            own, other = (scale.expand(-1, chains)[:, i : i + 1].double() for scale in (a_scale, b_scale))
            expected += (chain.double() * own * other.t()).float()
        slow = Accumulate.HOPPER_SLOW
        for level in native_bindings.levels():
            actual = native_gemm.hopper_sums(a, b, accumulate=slow, a_scale=a_scale, b_scale=b_scale, level=level)
            assert_same_bits(actual, expected, level)


def operand(rows: int, granularity: Granularity) -> QuantizedTensor:
    scale = torch.rand(granularity.scale_shape(torch.Size([rows, 300]))) + 0.5
    return QuantizedTensor(finite_codes(rows, 300, E4M3), scale, granularity, torch.float32)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128)], ids=str)
@every_way
def test_the_backend_without_native_kernels(granularity, how, monkeypatch):
    a, b = operand(20, granularity), operand(40, granularity)
    native = scaled_mm(a, b, accumulate=how, backend="hopper_model")
    monkeypatch.setattr(native_bindings, "why_absent", lambda: "hidden")
    assert torch.equal(native, scaled_mm(a, b, accumulate=how, backend="hopper_model"))


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(1, 128)], ids=str)
def test_one_operator_in_a_traced_graph(granularity):
    a, b = operand(20, granularity), operand(40, granularity)

    def multiply(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor) -> Tensor:
        left = QuantizedTensor(x, x_scale, granularity, torch.float32)
        right = QuantizedTensor(y, y_scale, granularity, torch.float32)
        return scaled_mm(left, right, accumulate=Accumulate.HOPPER_FAST)

    parts = (a.data, a.scale, b.data, b.scale)
    graph = torch.fx.experimental.proxy_tensor.make_fx(multiply, tracing_mode="fake")(*parts)
    assert [node.target for node in graph.graph.nodes].count(torch.ops.octavo.hopper_sums.default) == 1
    assert torch.equal(graph(*parts), multiply(*parts))


@every_way
def test_threads_change_nothing(how):
    a, b = finite_codes(200, 300, E4M3), finite_codes(300, 300, E5M2)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(native_gemm.hopper_sums(a, b, accumulate=how))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
