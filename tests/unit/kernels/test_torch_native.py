import threading

import pytest
import torch

import octavo
from octavo.formats import FP8_FORMATS
from octavo.kernels import dispatch, high_precision_mm, needs_widening, torch_native
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.torch_native import CudaBackend, _pad_to_16, widen
from octavo.numerics import Accumulate, PerRow, PerTensor
from octavo.numerics.reference import decode
from tests.contract.gemm_oracle import assert_product


def _settings():
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_widen_decodes_every_code(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)
    expected = torch.tensor([decode(code, fmt) for code in range(256)])
    wide = widen(codes)
    assert wide.dtype is torch.float32
    finite = ~expected.isnan()
    assert torch.equal(wide.isnan(), ~finite)
    assert torch.equal(wide[finite].view(torch.int32), expected[finite].view(torch.int32)), "signed zeros included"


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_widen_of_each_code_alone(fmt):
    """The NaN search looks at a whole tensor; no code may depend on its neighbours."""
    for code in range(256):
        wide = widen(torch.full((3,), code, dtype=torch.uint8).view(fmt.torch_dtype))
        expected = torch.full((3,), decode(code, fmt))
        torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_widen_keeps_shape_and_reads_strides(fmt):
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for view in (codes.t(), codes[::2, 1::3], codes[:0], codes[:, :0], codes.reshape(4, 4, 16).transpose(0, 1)):
        fp8 = view.view(fmt.torch_dtype)
        torch.testing.assert_close(widen(fp8), fp8.float(), rtol=0, atol=0, equal_nan=True)
    before = codes.clone()
    widen(codes.view(fmt.torch_dtype))
    assert torch.equal(codes, before), "the codes were written to"


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_gemm_precision_setting_is_put_back(has_bf16, monkeypatch):
    monkeypatch.setattr(torch_native, "_cpu_multiplies", lambda _: has_bf16)
    q = octavo.quantize(torch.randn(4, 8), octavo.E4M3)
    before = _settings()
    octavo.scaled_mm(q, q, backend="torch_cpu")
    assert _settings() == before
    with pytest.raises(RuntimeError):  # shapes that the GEMM itself refuses
        torch.ops.octavo.widened_mm(
            q.data, q.scale.reshape(1, 1), q.data[:, :3], q.scale.reshape(1, 1), None, torch.float32, 0
        )
    assert _settings() == before


def test_the_gemm_may_round_operands_where_that_is_exact(monkeypatch):
    monkeypatch.setattr(torch_native, "_cpu_multiplies", lambda _: True)
    seen: list[str] = []
    real = torch.mm

    def recording(a, b):
        seen.append(_settings())
        return real(a, b)

    monkeypatch.setattr(torch, "mm", recording)
    q = octavo.quantize(torch.randn(4, 8), octavo.E4M3)
    octavo.scaled_mm(q, q, backend="torch_cpu")
    assert seen == ["bf16"]
    assert _settings() != "bf16"


def test_the_gemm_precision_setting_survives_threads(monkeypatch):
    monkeypatch.setattr(torch_native, "_cpu_multiplies", lambda _: True)
    q = octavo.quantize(torch.randn(64, 512), octavo.E4M3)
    before = _settings()
    threads = [
        threading.Thread(target=lambda: [octavo.scaled_mm(q, q, backend="torch_cpu") for _ in range(40)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _settings() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_high_precision_product(dtype):
    a, b, bias = torch.randn(9, 40).to(dtype), torch.randn(5, 40).to(dtype), torch.randn(5).to(dtype)
    if dtype is torch.float16 and not needs_widening(a):  # torch's own float16 GEMM, whose sums are its business
        torch.testing.assert_close(high_precision_mm(a, b), (a.double() @ b.double().t()).half(), rtol=2e-3, atol=1e-2)
        return
    assert_product(high_precision_mm(a, b), a, b)
    if dtype is torch.float32 or needs_widening(a):
        assert_product(high_precision_mm(a, b, bias), a, b, bias)
    if needs_widening(a):
        with torch.autocast("cpu", torch.bfloat16):
            assert_product(high_precision_mm(a, b, bias), a, b, bias)


def test_padding_adds_zero_codes_up_to_multiples_of_16():
    codes = octavo.quantize(torch.randn(5, 18), octavo.E5M2).data
    padded = _pad_to_16(codes, rows=True)
    assert padded.shape == (16, 32)
    assert padded.is_contiguous()
    bits = padded.view(torch.uint8)
    assert torch.equal(bits[:5, :18], codes.view(torch.uint8))
    assert int(bits[5:].sum()) == int(bits[:, 18:].sum()) == 0
    assert _pad_to_16(codes, rows=False).shape == (5, 32)
    whole = octavo.quantize(torch.randn(16, 16), octavo.E4M3).data
    assert _pad_to_16(whole.t(), rows=True).is_contiguous()
    assert torch.equal(_pad_to_16(whole.t(), rows=True).view(torch.uint8), whole.t().view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it runs on CUDA, and the operands are on cpu"),
        ({"m": 0}, "an empty operand has no product"),
        ({"a_dtype": torch.float8_e5m2, "b_dtype": torch.float8_e5m2}, "cuBLAS does not multiply E5M2 by E5M2"),
        ({"a_dtype": torch.float8_e4m3fnuz}, "FNUZ formats have no tensor core here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_cuda_backend_objects_in_words(changes, reason, monkeypatch):
    from dataclasses import replace

    from octavo.kernels.backend import MatmulProblem

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    problem = MatmulProblem(
        m=16,
        n=16,
        k=16,
        device="cuda",
        a_dtype=torch.float8_e4m3fn,
        b_dtype=torch.float8_e4m3fn,
        a_granularity=PerTensor(),
        b_granularity=PerTensor(),
        out_dtype=torch.float32,
        bias=False,
        accumulate=Accumulate.HOPPER_FAST,
    )
    assert CudaBackend().unsupported_reason(problem) is None
    rows = replace(problem, a_granularity=PerRow(), b_granularity=PerRow())
    assert CudaBackend().unsupported_reason(rows) is None
    assert CudaBackend().unsupported_reason(replace(problem, **changes)) == reason


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("accumulate", [Accumulate.FP32, Accumulate.HOPPER_FAST])
def test_cuda_backend_asks_cublas_for_what_it_takes(granularity, with_bias, accumulate, monkeypatch):
    """A stand-in for ``torch._scaled_mm`` holds the wrapper to cuBLAS's rules and computes the product in float64."""

    def stand_in(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        per_row = scale_a.ndim == 2
        assert (scale_a.shape, scale_b.shape) == (((a.shape[0], 1), (1, b.shape[1])) if per_row else ((), ()))
        assert out_dtype is torch.bfloat16 or not per_row
        assert use_fast_accum is (accumulate is Accumulate.HOPPER_FAST)
        return (a.double() @ b.double() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    x, weight = torch.randn(5, 18), torch.randn(7, 18)
    a, b = (octavo.quantize(t, octavo.E4M3, granularity=granularity) for t in (x, weight))
    bias = torch.randn(7) if with_bias else None
    for out_dtype in (torch.bfloat16, torch.float32):
        problem = dispatch._describe(a, b, out_dtype, bias, accumulate)
        y = CudaBackend().scaled_mm(a, b, bias, problem)
        exact = ReferenceBackend().scaled_mm(a, b, bias, dispatch._describe(a, b, torch.float32, bias, Accumulate.FP32))
        assert y.dtype is out_dtype
        rounds_to_bf16 = out_dtype is torch.bfloat16 or isinstance(granularity, PerRow)
        torch.testing.assert_close(
            y.float(), exact, rtol=2**-8 if rounds_to_bf16 else 2**-22, atol=2**-5 * rounds_to_bf16
        )
