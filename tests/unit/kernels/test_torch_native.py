import threading

import pytest
import torch

import octavo
from octavo.formats import FP8_FORMATS
from octavo.kernels import high_precision_mm, needs_widening
from octavo.kernels.torch_native import CudaBackend, _pad_to_16, widen
from octavo.numerics import PerRow
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


def test_the_gemm_precision_setting_is_put_back():
    q = octavo.quantize(torch.randn(4, 8), octavo.E4M3)
    before = _settings()
    octavo.scaled_mm(q, q)
    assert _settings() == before
    with pytest.raises(RuntimeError):  # shapes that the GEMM itself refuses
        torch.ops.octavo.widened_mm(q.data, q.scale, q.data[:, :3], q.scale, None, torch.float32)
    assert _settings() == before


def test_the_gemm_precision_setting_survives_threads():
    q = octavo.quantize(torch.randn(64, 512), octavo.E4M3)
    before = _settings()
    threads = [threading.Thread(target=lambda: [octavo.scaled_mm(q, q) for _ in range(40)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _settings() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_high_precision_product(dtype):
    a, b, bias = torch.randn(9, 40).to(dtype), torch.randn(5, 40).to(dtype), torch.randn(5).to(dtype)
    if dtype is torch.float16:  # torch's own float16 GEMM, whose sums are its business
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
    from octavo.numerics import PerTensor

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
        fast_accumulation=True,
    )
    assert CudaBackend().unsupported_reason(problem) is None
    rows = replace(problem, a_granularity=PerRow(), b_granularity=PerRow())
    assert "bfloat16 for per-row scales" in str(CudaBackend().unsupported_reason(rows))
    assert CudaBackend().unsupported_reason(replace(problem, **changes)) == reason
