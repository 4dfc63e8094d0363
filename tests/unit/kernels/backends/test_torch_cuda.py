"""What cuBLAS is asked for: held to its rules by a stand-in here, run on a GPU where there is one."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import octavo
from octavo.kernels import dispatch
from octavo.kernels.backends import torch_cuda, triton
from octavo.kernels.backends.reference import ReferenceBackend
from octavo.kernels.backends.torch_cuda import CudaBackend, _aligned, _pad_to_16
from octavo.kernels.dispatch import explain
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor
from octavo.numerics.accumulate import hopper_sums
from tests.unit.kernels.matmul_problem import PROBLEM as TENSORWISE

HOPPER, ADA, BLACKWELL = (9, 0), (8, 9), (10, 0)


def device_is(monkeypatch, capability: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch_cuda, "_CUDA", cuda)


def test_padding_adds_zero_codes_up_to_multiples_of_16():
    codes = octavo.quantize(torch.randn(5, 18), octavo.E5M2).data
    padded = _pad_to_16(codes, rows=True, traced=False)
    assert padded.shape == (16, 32)
    assert padded.is_contiguous()
    bits = padded.view(torch.uint8)
    assert torch.equal(bits[:5, :18], codes.view(torch.uint8))
    assert int(bits[5:].sum()) == int(bits[:, 18:].sum()) == 0
    assert _pad_to_16(codes, rows=False, traced=False).shape == (5, 32)
    assert _pad_to_16(codes[:, :16], rows=True, traced=False).shape == (16, 16)
    whole = octavo.quantize(torch.randn(16, 16), octavo.E4M3).data
    assert _pad_to_16(whole.t(), rows=True, traced=False).is_contiguous()
    assert torch.equal(_pad_to_16(whole.t(), rows=True, traced=False).view(torch.uint8), whole.t().view(torch.uint8))
    row = octavo.quantize(torch.randn(32, 1), octavo.E4M3).data.t()
    assert row.is_contiguous()
    assert _pad_to_16(row, rows=False, traced=False).stride() == (32, 1)
    assert _pad_to_16(whole, rows=True, traced=False) is whole
    for crooked in (_unaligned(whole), _unaligned(row)):
        straight = _pad_to_16(crooked, rows=False, traced=False)
        assert straight.data_ptr() % 16 == 0
        assert straight.stride() == (crooked.shape[1], 1)
        assert torch.equal(straight.view(torch.uint8), crooked.view(torch.uint8))


PROBLEM = TENSORWISE._replace(
    m=16, n=16, k=16, device="cuda", b_dtype=torch.float8_e4m3fn, accumulate=Accumulate.HOPPER_FAST
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it runs on CUDA, and the operands are on cpu"),
        ({"m": 0}, "an empty operand has no product"),
        ({"a_dtype": torch.float8_e5m2, "b_dtype": torch.float8_e5m2}, "cuBLAS does not multiply E5M2 by E5M2"),
        ({"a_dtype": torch.float8_e4m3fnuz}, "FNUZ formats have no tensor core here"),
        (
            {"a_granularity": PerBlock(1, 128)},
            ("cuBLAS takes 1x128 by 1x128, 1x128 by 128x128 and 128x128 by 1x128, not other block scales"),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_problems_give_a_reason(changes, reason, monkeypatch):
    device_is(monkeypatch, HOPPER)
    assert CudaBackend().unsupported_reason(PROBLEM) is None
    rows = PROBLEM._replace(a_granularity=PerRow(), b_granularity=PerRow())
    assert CudaBackend().unsupported_reason(rows) is None
    assert CudaBackend().unsupported_reason(PROBLEM._replace(**changes)) == reason


LINES, SQUARES = PerBlock(1, 128), PerBlock(128, 128)
BLOCKS = PROBLEM._replace(
    m=20, n=48, k=512, a_granularity=LINES, b_granularity=SQUARES, accumulate=Accumulate.FP32, bias=True
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"a_granularity": SQUARES, "b_granularity": LINES}, None),
        ({"b_granularity": LINES, "k": 384}, None),
        ({"k": 384}, "M must be a multiple of 4, N of 16 and K of 512"),
        ({"b_granularity": LINES, "k": 320}, "M must be a multiple of 4, N of 16 and K of 128"),
        ({"m": 21}, "M must be a multiple of 4, N of 16 and K of 512"),
        ({"n": 40}, "M must be a multiple of 4, N of 16 and K of 512"),
        ({"a_granularity": SQUARES}, "not other block scales"),
        ({"a_granularity": PerBlock(1, 32), "b_granularity": PerBlock(1, 32)}, "not other block scales"),
        ({"accumulate": Accumulate.HOPPER_SLOW}, "adds the sums of blocks is not documented"),
    ],
    ids=str,
)
def test_blocks_it_takes(changes, reason, monkeypatch):
    device_is(monkeypatch, HOPPER)
    found = CudaBackend().unsupported_reason(BLOCKS._replace(**changes))
    assert found is reason is None or (found is not None and reason is not None and found.endswith(reason))


@pytest.mark.parametrize("rows", [(20, 24, 400), (21, 22, 399)], ids=["it takes", "it refuses"])
def test_a_graph_of_one_number_of_rows_serves_others(rows, monkeypatch):
    device_is(monkeypatch, HOPPER)
    graphs = CompileCounter()

    def choose(x: Tensor) -> Tensor:
        explain(BLOCKS._replace(m=x.shape[0]))
        return x + 1

    compiled = torch.compile(choose, backend=graphs, fullgraph=True, dynamic=True)
    for m in rows:
        compiled(torch.zeros(m))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(("capability", "cuda"), [(ADA, (13, 0)), (BLACKWELL, (13, 0)), (HOPPER, (12, 8))])
def test_blocks_are_hoppers(capability, cuda, monkeypatch):
    device_is(monkeypatch, capability, cuda)
    reason = "cuBLAS has block scales on compute capability 9.0 alone, since CUDA 12.9"
    assert CudaBackend().unsupported_reason(BLOCKS) == reason


def test_blocks_are_its_own_before_tritons_which_can_be_named(monkeypatch):
    device_is(monkeypatch, HOPPER)
    monkeypatch.setattr(triton, "WHY_ABSENT", None)
    assert dispatch.explain(BLOCKS).backend == "torch_cuda"
    assert dispatch._named("triton", BLOCKS).name == "triton"


def _block_product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    """What cuBLAS makes of a [M, K] and b [K, N], with its rules for their scales."""
    assert a.stride() == (a.shape[1], 1)
    assert b.stride() == (1, b.shape[0])
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert options["bias"] is None
    assert options["use_fast_accum"] is False
    exact = []
    for codes, scale in ((a, scale_a), (b.t(), scale_b.t())):
        rows, blocks = codes.shape[0], codes.shape[1] // 128
        assert scale.dtype is torch.float32
        assert scale.data_ptr() % 16 == 0
        lines = scale.shape == (rows, blocks) and scale.stride() == (1, rows)
        assert lines or (scale.shape == (-(-rows // 128), blocks) and scale.stride() == (blocks, 1))
        wide = scale if lines else scale.repeat_interleave(128, dim=0)[:rows]
        exact.append(codes.double() * wide.double().repeat_interleave(128, dim=1))
    return (exact[0] @ exact[1].t()).to(options["out_dtype"])


@pytest.mark.parametrize("granularities", [(LINES, SQUARES), (SQUARES, LINES), (LINES, LINES)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_cublas_gets_block_scales_in_its_layout(granularities, biased, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", _block_product)
    device_is(monkeypatch, HOPPER)
    x, weight = torch.randn(132, 512), torch.randn(160, 512)
    operands = [octavo.quantize(t, octavo.E4M3, granularity=g) for t, g in zip((x, weight), granularities, strict=True)]
    bias = torch.randn(160) if biased else None
    problem = dispatch._describe(operands[0], operands[1], torch.bfloat16, bias, Accumulate.FP32)
    wanted = ReferenceBackend().scaled_mm(operands[0], operands[1], bias, problem)
    crooked = [replace(q, data=_unaligned(q.data), scale=_unaligned(q.scale)) for q in operands]
    for a, b in (operands, crooked):
        y = CudaBackend().scaled_mm(a, b, bias, problem)
        assert (y.dtype, y.shape) == (torch.bfloat16, (132, 160))
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-7)


def test_a_graph_has_one_operator_for_blocks(monkeypatch):
    device_is(monkeypatch, HOPPER)
    with FakeTensorMode():
        a, b = (
            QuantizedTensor(
                torch.empty(rows, 512, device="cuda", dtype=torch.float8_e4m3fn),
                torch.empty(g.scale_shape(torch.Size([rows, 512])), device="cuda"), g, torch.bfloat16,
            )
            for rows, g in ((20, LINES), (48, SQUARES))
        )  # fmt: skip
        y = octavo.scaled_mm(a, b, out_dtype=torch.float32, backend="torch_cuda")
        assert (y.shape, y.dtype, y.device.type) == ((20, 48), torch.float32, "cuda")


def _unaligned(x: Tensor) -> Tensor:
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[1:].copy_(x.flatten()).view(x.shape)


@pytest.mark.parametrize("shape", [(5, 1), (1, 1), (4, 3)], ids=str)
def test_scales_begin_at_a_multiple_of_16_bytes(shape):
    whole = torch.randn(shape)
    assert _aligned(whole, traced=False) is whole
    for crooked in (_unaligned(whole), _unaligned(whole.t()).t()):
        assert crooked.data_ptr() % 16 == 4
        found = _aligned(crooked, traced=False)
        assert found.data_ptr() % 16 == 0
        assert torch.equal(found, crooked)
        assert found.stride() == crooked.stride()


@pytest.mark.parametrize("capability", [ADA, BLACKWELL])
def test_only_hopper_sums_as_hopper_does(capability, monkeypatch):
    device_is(monkeypatch, capability)
    assert CudaBackend().unsupported_reason(PROBLEM._replace(accumulate=Accumulate.FP32)) is None
    for accumulate in (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW):
        reason = CudaBackend().unsupported_reason(PROBLEM._replace(accumulate=accumulate)) or ""
        assert reason.startswith("only Hopper sums as Hopper does")


def test_problems_that_would_be_rounded_twice_are_declined(monkeypatch):
    rows = PROBLEM._replace(a_granularity=PerRow(), accumulate=Accumulate.FP32)
    plain, biased = rows._replace(out_dtype=torch.bfloat16), rows._replace(out_dtype=torch.bfloat16, bias=True)
    for capability, cuda in ((HOPPER, (12, 8)), (BLACKWELL, (13, 0))):
        device_is(monkeypatch, capability, cuda)
        for problem in (rows, biased, rows._replace(out_dtype=torch.float16)):
            reason = CudaBackend().unsupported_reason(problem)
            assert reason == f"with per-row scales it would round to bfloat16 before {problem.out_dtype} or a bias"
        assert CudaBackend().unsupported_reason(plain) is None
    device_is(monkeypatch, ADA)  # nobody else multiplies there
    assert CudaBackend().unsupported_reason(rows) is None


class _CublasStandIn:
    """Holds the wrapper to cuBLAS's rules, computes in float64, and remembers what was asked."""

    def __call__(self, a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum) -> Tensor:
        assert a.stride() == (a.shape[1], 1)
        assert b.t().stride() == (b.shape[0], 1)
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        per_row = scale_a.ndim == 2
        assert (scale_a.shape, scale_b.shape) == (((a.shape[0], 1), (1, b.shape[1])) if per_row else ((), ()))
        assert not per_row or (scale_a.is_contiguous() and scale_b.is_contiguous())
        assert not per_row or scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
        assert bias is None or (bias.shape == (b.shape[1],) and bias.dtype is out_dtype is not torch.float32)
        self.out_dtype, self.fast, self.bias = out_dtype, use_fast_accum, bias
        return (a.double() @ b.double() * scale_a * scale_b + (0 if bias is None else bias)).to(out_dtype)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [Accumulate.FP32, Accumulate.HOPPER_FAST])
@pytest.mark.parametrize("weight_shape", [(7, 18), (16, 18), (7, 16), (16, 16)], ids=str)
def test_cublas_receives_supported_arguments(granularity, bias_dtype, accumulate, weight_shape, monkeypatch):
    cublas = _CublasStandIn()
    monkeypatch.setattr(torch, "_scaled_mm", cublas)
    width, k = weight_shape
    x, weight = torch.randn(5, k), torch.randn(weight_shape)
    a, b = (octavo.quantize(t, octavo.E4M3, granularity=granularity) for t in (x, weight))
    a, b = (replace(q, data=_unaligned(q.data), scale=_unaligned(q.scale)) for q in (a, b))
    bias = None if bias_dtype is None else torch.randn(width).to(bias_dtype)
    exact = ReferenceBackend().scaled_mm(a, b, bias, dispatch._describe(a, b, torch.float32, bias, Accumulate.FP32))
    for capability, out_dtype in itertools.product((HOPPER, ADA), (torch.bfloat16, torch.float32)):
        device_is(monkeypatch, capability)
        y = CudaBackend().scaled_mm(a, b, bias, dispatch._describe(a, b, out_dtype, bias, accumulate))
        assert (y.dtype, y.shape) == (out_dtype, (5, width))
        assert y.is_contiguous()
        assert cublas.fast is (accumulate is Accumulate.HOPPER_FAST)
        assert (cublas.bias is not None) == (bias_dtype is torch.bfloat16 is out_dtype)
        rounds_early = capability is ADA and isinstance(granularity, PerRow)
        assert rounds_early == (cublas.out_dtype is torch.bfloat16) or out_dtype is torch.bfloat16
        tolerance = 2**-8 if rounds_early or out_dtype is torch.bfloat16 else 2**-22
        torch.testing.assert_close(y.float(), exact, rtol=tolerance, atol=2**-5 if tolerance == 2**-8 else 2**-22)


def test_a_bias_that_learns_has_a_gradient(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", _CublasStandIn())
    device_is(monkeypatch, HOPPER)
    a = octavo.quantize(torch.randn(16, 16, dtype=torch.bfloat16), octavo.E4M3)
    bias = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)
    y = CudaBackend().scaled_mm(a, a, bias, dispatch._describe(a, a, None, bias, Accumulate.FP32))
    y.sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((16,), 16.0, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
@pytest.mark.parametrize("shape", [(512, 384, 1024), (33, 40, 4096), (1, 7, 130)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_the_product_is_within_a_tensor_core_of_the_exact_one(granularity, shape, out_dtype):
    """A step of 32 loses less than 34 units of 2^-13 of its chain's magnitudes, and a chain of 128 has four steps."""
    m, n, k = shape
    a, b = (
        octavo.quantize(torch.randn(rows, k, device="cuda"), octavo.E4M3, granularity=granularity) for rows in (m, n)
    )
    for bias in (None, torch.randn(n, device="cuda").to(out_dtype)):
        y = octavo.scaled_mm(a, b, out_dtype=out_dtype, bias=bias, backend="torch_cuda")
        exact = octavo.scaled_mm(a, b, out_dtype=torch.float32, bias=bias, backend="reference").double()
        magnitudes = octavo.scaled_mm(_magnitudes(a), _magnitudes(b), out_dtype=torch.float32, backend="reference")
        allowed = magnitudes.double() * 4 * 34 * 2**-13 + exact.abs() * torch.finfo(out_dtype).eps
        assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("granularities", [(LINES, SQUARES), (SQUARES, LINES), (LINES, LINES)], ids=str)
@pytest.mark.parametrize("shape", [(512, 384, 1024), (20, 48, 512), (132, 272, 4096)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_hopper_blocks_are_scaled_as_defined(granularities, shape, out_dtype):
    m, n, k = shape
    a, b = (
        octavo.quantize(torch.randn(rows, k, device="cuda"), octavo.E4M3, granularity=granularity)
        for rows, granularity in zip((m, n), granularities, strict=True)
    )
    bias = torch.randn(n, device="cuda")
    problem = dispatch._describe(a, b, out_dtype, bias, Accumulate.FP32)
    reason = CudaBackend().unsupported_reason(problem)
    if reason is not None:
        pytest.skip(reason)
    y = CudaBackend().scaled_mm(a, b, bias, problem)
    exact = octavo.scaled_mm(a, b, out_dtype=torch.float32, bias=bias, backend="reference").double()
    magnitudes = octavo.scaled_mm(_magnitudes(a), _magnitudes(b), out_dtype=torch.float32, backend="reference")
    allowed = magnitudes.double() * 4 * 34 * 2**-13 + exact.abs() * torch.finfo(out_dtype).eps
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.gpu
def test_on_a_gpu_the_bias_is_added_before_the_only_rounding():
    ones = QuantizedTensor(
        torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn), torch.tensor(1027.0 / 16).cuda(), PerTensor(),
        torch.bfloat16,
    )  # fmt: skip
    unit = replace(ones, scale=torch.tensor(1.0).cuda())
    rows = [replace(q, scale=q.scale.expand(16, 1).contiguous(), granularity=PerRow()) for q in (ones, unit)]
    bias = torch.full((16,), 3.0, dtype=torch.bfloat16, device="cuda")
    for a, b in ((ones, unit), rows):
        for given in (bias, bias.float()):
            assert octavo.scaled_mm(a, b, bias=given, backend="torch_cuda").unique().tolist() == [1032.0]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW])
def test_on_hopper_the_sums_are_those_of_the_model(accumulate):
    """K of one chain: how a library cuts longer ones is its own affair."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper sums as Hopper does")
    a, b = (octavo.quantize(torch.randn(rows, 128, device="cuda"), octavo.E4M3) for rows in (128, 64))
    one = torch.ones((), device="cuda")
    a, b = replace(a, scale=one), replace(b, scale=one)
    y = octavo.scaled_mm(a, b, out_dtype=torch.float32, accumulate=accumulate, backend="torch_cuda")
    assert torch.equal(y, hopper_sums(a.data, b.data, accumulate=accumulate))


def _magnitudes(q: QuantizedTensor) -> QuantizedTensor:
    return replace(q, data=(q.data.view(torch.uint8) & 0x7F).view(q.data.dtype))
