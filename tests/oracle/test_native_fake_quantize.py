"""Values without codes: the native pass against a cast and its decoding, bit for bit, in place and elsewhere."""

import itertools
import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2
from octavo.kernels import fake_quantize, native_bindings
from octavo.numerics import CastSpec, PerBlock, PerRow, PerTensor, ScaleRounding, dequantize, quantize
from tests.oracle.test_native_casts import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, RULE, numbers, scales

pytestmark = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def assert_same_values(x, fmt, granularity, rule=RULE):
    """At every level: into new memory, into other memory that lies as x does, into some that does not, and in place."""
    wanted, before = dequantize(quantize(x, fmt, granularity=granularity, **rule)), x.clone()
    for level in native_bindings.levels():
        assert_same(
            native_bindings.fake_quantize(x, CastSpec(format=fmt, granularity=granularity, **rule), level=level),
            wanted,
            level,
        )
        assert_same(x, before, level)
        for out in (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)):
            if 0 in out.stride():
                continue
            assert (
                native_bindings.fake_quantize(
                    x, CastSpec(format=fmt, granularity=granularity, **rule), out=out, level=level
                )
                is out
            )
            assert_same(out, wanted, level)
            assert_same(x, before, level)
        if 0 not in x.stride():
            own = x.untyped_storage().clone()
            there = torch.empty(0, dtype=x.dtype).set_(own, x.storage_offset(), x.shape, x.stride())
            assert (
                native_bindings.fake_quantize(
                    there, CastSpec(format=fmt, granularity=granularity, **rule), out=there, level=level
                )
                is there
            )
            assert_same(there, wanted, level)


def assert_same(found, wanted, note):
    """Bit for bit, but for the signs of NaNs."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    same = (found.contiguous().view(bits) == wanted.contiguous().view(bits)) | (found.isnan() & wanted.isnan())
    assert same.all(), note


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input(fmt, dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = every[every.isfinite()]
    for x in (every, finite, finite[: finite.numel() // 3 * 3].reshape(3, -1)):
        for granularity in (PerTensor(), PerRow()):
            if x.ndim == 2 or isinstance(granularity, PerTensor):
                assert_same_values(x, fmt, granularity)
    for amax in scales()[::6]:  # the rest lies below
        assert_same_values(finite.clamp(-amax, amax), fmt, PerTensor())


@every_granularity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_granularity_layout_and_rule(granularity, dtype):
    for layout in LAYOUTS.values():
        assert_same_values(layout(numbers(9, 150, dtype=dtype)), E4M3, granularity)
    for fmt, rounding in zip(FORMATS, (ScaleRounding.FP32, ScaleRounding.RCEIL), strict=True):
        assert_same_values(
            numbers(130, 261, dtype=dtype),
            fmt,
            granularity,
            {"scale_rounding": rounding, "amax_floor": 0.0, "margin": 1},
        )


@every_granularity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_elements_stay_nonfinite(granularity, dtype):
    x = numbers(140, 270, dtype=dtype)
    x[3, 5], x[3, 200], x[100, 5], x[:, 77], x[139] = math.nan, math.inf, -math.inf, math.nan, math.inf
    for view, fmt in itertools.product((x, x.t()), FORMATS):
        assert_same_values(view, fmt, granularity)


def test_long_rows_and_more_dimensions():
    for granularity in (PerTensor(), PerRow()):
        assert_same_values(numbers(3, 9001, dtype=torch.bfloat16), E4M3, granularity)
        assert_same_values(numbers(9001, 3, dtype=torch.bfloat16).t(), E4M3, granularity)
        x = numbers(3, 5, 70)
        for view in (x, x.transpose(0, 1), x.permute(2, 0, 1), x[:, :, ::3], x[:, :, :9]):
            assert_same_values(view, E5M2, granularity)


@every_granularity
def test_in_place_leaves_what_lies_around(granularity):
    for level in native_bindings.levels():
        around = torch.full((80, 100), 7.0, dtype=torch.bfloat16)
        inner = around[3:70, 5:90]
        inner.copy_(numbers(67, 85))
        native_bindings.fake_quantize(
            inner, CastSpec(format=E4M3, granularity=granularity, **RULE), out=inner, level=level
        )
        inner.fill_(7.0)
        assert (around == 7.0).all(), level


def test_memory_that_overlaps():
    x = numbers(1000)
    wanted = fake_quantize(x[:-1], E4M3)
    assert torch.equal(fake_quantize(x[:-1], E4M3, out=x[1:]), wanted)
    assert torch.equal(x[1:], wanted)
    with pytest.raises(RuntimeError, match="single memory location"):
        fake_quantize(x[:4], E4M3, out=torch.zeros(1).expand(4))


def test_in_place_for_users():
    x = numbers(30, 40, dtype=torch.bfloat16)
    wanted = fake_quantize(x, E4M3, granularity=PerBlock(1, 32))
    version = x._version
    assert fake_quantize(x, E4M3, granularity=PerBlock(1, 32), out=x) is x
    assert torch.equal(x, wanted)
    assert x._version > version


def test_no_gradient_through_out():
    x = torch.randn(4, requires_grad=True)
    for given, out in ((x, x), (x, torch.empty(4)), (torch.ones(4), torch.ones(4, requires_grad=True))):
        with pytest.raises(ConfigError, match="gradient"):
            fake_quantize(given, E4M3, out=out)
    with torch.no_grad():
        assert fake_quantize(x, E4M3, out=x) is x
    kept = torch.randn(4)
    y = (torch.ones(4, requires_grad=True) * kept).sum()
    fake_quantize(kept, E4M3, out=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        x = torch.randn(4)
        assert fake_quantize(x, E4M3, out=x) is x


@pytest.mark.parametrize("out", [torch.empty(5), torch.empty(4, dtype=torch.float16), torch.empty(4, device="meta")])
def test_out_must_be_like_x(out):
    with pytest.raises(ConfigError, match="out must be like x"):
        fake_quantize(torch.ones(4), E4M3, out=out)


def test_without_a_kernel_the_same():
    for x in (numbers(5, 6).double(), torch.empty(0, 3)):
        wanted = dequantize(quantize(x, E4M3))
        assert torch.equal(fake_quantize(x, E4M3, out=x), wanted)
        assert torch.equal(x, wanted)


def test_compiled_the_same():
    x = numbers(6, 40, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: fake_quantize(x, E4M3, out=x), backend="aot_eager", fullgraph=True)
    wanted = fake_quantize(x, E4M3)
    assert torch.equal(compiled(x.clone()), wanted)
    compiled(x)
    assert torch.equal(x, wanted)
