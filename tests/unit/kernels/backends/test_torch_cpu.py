import threading

import pytest
import torch

import octavo
from octavo.formats import FP8_FORMATS
from octavo.kernels import high_precision_mm, needs_widening
from octavo.kernels.backends import torch_cpu
from octavo.kernels.backends.torch_cpu import widen
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
    monkeypatch.setattr(torch_cpu, "_cpu_multiplies", lambda _: has_bf16)
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
    monkeypatch.setattr(torch_cpu, "_cpu_multiplies", lambda _: True)
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
    monkeypatch.setattr(torch_cpu, "_cpu_multiplies", lambda _: True)
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
