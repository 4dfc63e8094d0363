"""Casts as users call them: the native kernels and octavo.numerics give the same, checks and gradients included."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, E8M0, FP8_FORMATS
from octavo.kernels import cast, fake_quantize, native_bindings, quantize
from octavo.numerics import CastSpec, PerBlock, PerRow, PerTensor, QuantizedTensor, ScaleRounding, measure
from octavo.numerics import quantize as quantize_by_torch
from octavo.numerics.granularity import granularity_as_list

GRANULARITIES = [PerTensor(), PerRow(), PerBlock(2, 3)]
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def assert_same(found: QuantizedTensor, wanted: QuantizedTensor):
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)
    assert (found.granularity, found.hp_dtype, found.scale.dtype) == (
        wanted.granularity, wanted.hp_dtype, wanted.scale.dtype,
    )  # fmt: skip


@every_granularity
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (0, 7), (5, 0)], ids=str)
def test_every_format_and_empty_tensors_too(granularity, fmt, shape):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        assert_same(quantize(x, fmt, granularity=granularity), quantize_by_torch(x, fmt, granularity=granularity))
        found = quantize(x, fmt, granularity=granularity)
        assert torch.equal(found.dequantize(), quantize_by_torch(x, fmt, granularity=granularity).dequantize())


def test_every_option():
    x = torch.randn(6, 64)
    for options in (
        {"margin": 3}, {"margin": 10**30}, {"amax_floor": 10.0}, {"amax": torch.tensor(0.0)},
        {"scale": torch.tensor(0.5)},
        {"scale_rounding": ScaleRounding.EVEN, "scale_format": E8M0},
        {"scale": torch.tensor(0.5), "scale_format": E8M0},
    ):  # fmt: skip
        assert_same(quantize(x, E5M2, **options), quantize_by_torch(x, E5M2, **options))


@every_granularity
def test_measurement_is_returned_with_the_cast(granularity):
    x = torch.randn(6, 9)
    spec = CastSpec(format=E4M3, granularity=granularity, amax_floor=1e-12)
    for bad in (None, float("inf"), float("nan")):
        if bad is not None:
            x[1, 2] = bad
        found = cast(x, spec).measurement
        wanted = measure(x, granularity)
        assert found is not None
        assert torch.equal(found.amax, wanted.amax)
        assert found.nonfinite == wanted.nonfinite


def test_stand_ins_are_cast_by_an_operator():
    with FakeTensorMode():
        for x in (torch.empty(4, 6), torch.empty(6, 4).t(), torch.empty(2, 3, 4)):
            q = quantize(x, E4M3, granularity=PerRow())
            assert (q.data.shape, q.data.dtype) == (x.shape, torch.float8_e4m3fn)
            assert q.scale.shape == (*x.shape[:-1], 1)
            assert q.dequantize().shape == x.shape
    assert octavo.quantize(torch.empty(4, 6, device="meta"), E4M3).data.device.type == "meta"


def test_a_learned_scale_has_a_gradient():
    scale = torch.tensor(0.5, requires_grad=True)
    q = QuantizedTensor(torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), scale, PerTensor(), torch.float32)
    q.dequantize().sum().backward()
    assert scale.grad is not None
    assert scale.grad.item() == 4.0


@every_granularity
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fake_quantize_rounds_forward_and_passes_gradients(granularity, dtype):
    x = torch.randn(5, 7).to(dtype).requires_grad_()
    y = fake_quantize(x, E4M3, granularity=granularity, scale_rounding=ScaleRounding.RCEIL)
    assert torch.equal(y, quantize(x, E4M3, granularity=granularity, scale_rounding=ScaleRounding.RCEIL).dequantize())
    upstream = torch.randn(5, 7).to(dtype)
    y.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def test_fake_quantize_has_no_second_derivative():
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(fake_quantize(x, E4M3).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_fake_quantize_writes_in_inference_mode():
    with torch.inference_mode():
        x = torch.randn(5, 7)
        wanted, out = fake_quantize(x, E4M3), torch.empty(5, 7)
        assert fake_quantize(x, E4M3, out=out) is out
        assert torch.equal(out, wanted)
        assert torch.equal(fake_quantize(x, E4M3, out=x), wanted)


def test_fake_quantize_refuses_integers():
    with pytest.raises(ConfigError, match=r"not torch\.int64"):
        fake_quantize(torch.arange(3), E4M3)


@every_granularity
@pytest.mark.parametrize("x", [torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(1, 8), torch.randn(8, 1).t()])
def test_the_operator_is_what_its_shape_function_says(x, granularity):
    if native_bindings.why_absent():
        pytest.skip(f"no native kernels: {native_bindings.why_absent()}")
    block = granularity_as_list(granularity)
    arguments = (x, torch.float8_e4m3fn, block, "fp32", 1e-12, 0, True, None, None, False, True, "")
    torch.library.opcheck(torch.ops.octavo.cast, arguments, test_utils=("test_faketensor",))
