"""The native GEMM against exact sums, within what FP32 sums may lose: every level, layout, format pair and scale."""

import itertools
import math
import subprocess
import sys
from functools import partial

import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels import native_bindings, native_gemm
from octavo.numerics import PerBlock, PerRow, PerTensor, QuantizedTensor
from octavo.numerics.quantized import rows_of_scales
from tests.contract.gemm_oracle import assert_product

pytestmark = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)

# One of each: smaller than a panel, ragged panels, several tiles, K beyond a chunk of 256 and no multiple of 8.
# With up to eight rows, another kernel.
SHAPES = ((1, 1, 1), (7, 33, 19), (1, 40, 1000), (5, 70, 300), (100, 130, 300), (13, 257, 700), (193, 129, 257))
GRANULARITIES = (PerTensor(), PerRow(), PerBlock(1, 32), PerBlock(1, 128), PerBlock(128, 128), PerBlock(5, 300))


def operand(rows, columns, fmt, granularity, *, transposed=False, exponent=0):
    values = torch.randn(rows, columns).to(fmt.torch_dtype)
    if transposed:
        values = values.view(torch.uint8).t().contiguous().t().view(fmt.torch_dtype)
    scale = (torch.rand(granularity.scale_shape(values.shape)) + 0.5) * 2.0**exponent
    return QuantizedTensor(values, scale, granularity, torch.float32)


def product(a, b, bias, out_dtype, level):
    block = max((g.columns for g in (a.granularity, b.granularity) if isinstance(g, PerBlock)), default=0)
    scales = {"a_scale": rows_of_scales(a), "b_scale": rows_of_scales(b)}
    return native_gemm.gemm(a.data, b.data, **scales, out_dtype=out_dtype, bias=bias, block=block, level=level)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_every_layout_and_pair_of_formats(shape, granularity):
    M, N, K = shape
    for formats, turned in itertools.product(
        ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), itertools.product((False, True), repeat=2)
    ):
        a, b = (
            operand(rows, K, fmt, granularity, transposed=t)
            for rows, fmt, t in zip((M, N), formats, turned, strict=True)
        )
        for level in native_bindings.levels():
            for out_dtype, bias in ((torch.float32, None), (torch.bfloat16, torch.randn(N)), (torch.float16, None)):
                assert_product(product(a, b, bias, out_dtype, level), a, b, bias)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize(("left", "right"), [(126, -120), (-147, 126)])
def test_scales_that_leave_fp32_one_by_one_meet_inside(left, right, rows, granularity):
    """A sum times the left scale alone would be infinite, or have few bits left."""
    a, b = operand(rows, 300, E4M3, granularity, exponent=left), operand(40, 300, E4M3, granularity, exponent=right)
    for level in native_bindings.levels():
        assert_product(product(a, b, None, torch.float32, level), a, b, None)


def test_every_code_is_read():
    """One times each of the 256 codes is that code, NaN and infinities included, in every place of a panel."""
    for fmt in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)
        unit = torch.eye(40).to(fmt.torch_dtype)
        one = torch.ones(1, 1)
        for level in native_bindings.levels():
            column = native_gemm.gemm(
                codes[:, None], unit[:1, :1], a_scale=one, b_scale=one, out_dtype=torch.float32, level=level
            )
            torch.testing.assert_close(column[:, 0], codes.float(), rtol=0, atol=0, equal_nan=True)
            finite = codes[codes.float().isfinite()][: 40 * 6].reshape(6, 40)
            same = native_gemm.gemm(finite, unit, a_scale=one, b_scale=one, out_dtype=torch.float32, level=level)
            assert torch.equal(same, finite.float())


@pytest.mark.parametrize("rows", [5, 30])
def test_an_infinity_stays_in_its_row_and_column(rows):
    a, b = operand(rows, 70, E5M2, PerTensor()), operand(50, 70, E4M3, PerTensor())
    a.data[4, 7] = math.inf
    b.data[9, 3] = math.nan
    for level in native_bindings.levels():
        found = product(a, b, None, torch.float32, level)
        is_bad = ~found.isfinite()
        assert is_bad[4].all()
        assert is_bad[:, 9].all()
        assert is_bad.sum() == 50 + rows - 1


def test_threads_change_nothing():
    a, b = operand(500, 700, E4M3, PerRow()), operand(300, 700, E5M2, PerRow())
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(product(a, b, None, torch.float32, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 40])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
def test_high_precision_times_codes(dtype, rows, granularity):
    """Weights in FP8, activations as they are; and the product with the transposed weight, as backward needs it."""
    weight = operand(130, 300, E4M3, granularity)
    for level in native_bindings.levels():
        x, bias = torch.randn(rows, 300).to(dtype), torch.randn(130)
        exact = x.double() @ weight.dequantize().double().t() + bias
        block = granularity.columns if isinstance(granularity, PerBlock) else 0
        found = native_gemm.gemm(
            x, weight.data, b_scale=rows_of_scales(weight), out_dtype=torch.float32, bias=bias, block=block, level=level
        )
        bound = 300 * 2.0**-24 * (x.double().abs() @ weight.dequantize().double().abs().t() + bias.abs())
        assert ((found - exact).abs() <= bound).all()
        strided = native_gemm.gemm(x.t().contiguous().t(), weight.data, out_dtype=torch.float32, level=level)
        plain = x.double() @ weight.data.double().t()
        assert ((strided - plain).abs() <= 300 * 2.0**-24 * (x.double().abs() @ weight.data.double().abs().t())).all()
        grad = torch.randn(rows, 130).to(dtype)
        back = native_gemm.gemm(grad, weight.data.t(), out_dtype=torch.float32, level=level)
        exact = grad.double() @ weight.data.double()
        assert ((back - exact).abs() <= 130 * 2.0**-24 * (grad.double().abs() @ weight.data.double().abs())).all()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    weight = operand(70, 700, E4M3, PerBlock(1, 128))
    x = torch.randn(16, 700)
    for level in native_bindings.levels():
        for block, scale in ((0, None), (128, rows_of_scales(weight))):
            times = partial(
                native_gemm.gemm, b=weight.data, b_scale=scale, block=block, out_dtype=torch.float32, level=level
            )
            one_by_one = torch.cat([times(row[None]) for row in x])
            for rows in (2, 3, 4, 7, 16):
                assert torch.equal(times(x[:rows]), one_by_one[:rows])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("copies", [1, 4])
def test_numbers_of_any_size_meet_codes_of_any_size(fmt, flush, copies):
    """Each row has one number, at one end of FP32, beside one at the other end that meets a code of zero."""
    codes = torch.tensor([fmt.min_subnormal, -fmt.min_normal, 1.0, -fmt.max]).to(fmt.torch_dtype)
    weight = torch.zeros(4, 70).to(fmt.torch_dtype)
    weight[:, 37] = codes
    sizes = torch.tensor([2.0**-149, 2.0**-126, 1.1e-37, 3e-30, 1.0, 3e30, 1.5 * 2.0**111]).repeat(copies)
    for other in (0.0, 2.0**-149, 1.0, 3e38):
        x = torch.full((len(sizes), 70), other)
        x[:, 37] = sizes
        exact = sizes[:, None].double() * codes.double()
        for level in native_bindings.levels():
            torch.set_flush_denormal(flush)
            try:
                found = native_gemm.gemm(x, weight, out_dtype=torch.float32, level=level)
                turned = native_gemm.gemm(weight, x, out_dtype=torch.float32, level=level)
            finally:
                torch.set_flush_denormal(False)
            assert torch.equal(found, exact.float())
            assert torch.equal(turned, exact.float().t())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_numbers_pass_through_few_rows(fmt, special):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)
    weight = torch.ones(256, 100).to(fmt.torch_dtype)
    weight[:, 61] = codes
    x = torch.ones(5, 100)
    x[3, 61] = special
    with_special = x.double() @ weight.double().t()
    for level in native_bindings.levels():
        found = native_gemm.gemm(x, weight, out_dtype=torch.float32, level=level).double()
        torch.testing.assert_close(found, with_special, rtol=1e-5, atol=0, equal_nan=True)


MEMORY = """
import resource
import torch
import octavo
from octavo.kernels import native_gemm

a, b = (octavo.quantize(torch.ones(rows, 8), octavo.E4M3) for rows in (30_000, 30_000))
octavo.scaled_mm(a.t(), a.t())
held = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = held()
octavo.scaled_mm(a, octavo.quantize(torch.ones(4_000, 8), octavo.E4M3), out_dtype=torch.bfloat16)
assert held() - before < 100e6, "nearly 500 MB of sums are kept"
few, others = (torch.ones(rows, 2**20, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (16, 1))
native_gemm.gemm(few, others, out_dtype=torch.float32)
assert held() - before < 100e6, "134 MB of few rows are kept"
resource.setrlimit(resource.RLIMIT_AS, (held() + 8 * 2**30,) * 2)
try:
    native_gemm.gemm(torch.ones(40_000, 1).to(torch.float8_e4m3fn), torch.ones(80_000, 1).to(torch.float8_e4m3fn),
             out_dtype=torch.bfloat16)
except MemoryError:
    print("refused")
"""


@pytest.mark.long
def test_memory_is_given_back_and_its_lack_is_an_error():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "refused\n", done.stderr[-500:]
