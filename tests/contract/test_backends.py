"""Every backend, one suite: what it supports it computes within the GEMM's bound; the rest it refuses, with a reason.

Operands are raw codes, so that every one of a format's 256 occurs, with scales that no quantization would have chosen.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import FP8_FORMATS, Format
from octavo.kernels import scaled_mm
from octavo.kernels.backend import Backend, MatmulProblem
from octavo.kernels.dispatch import BACKENDS, explain
from octavo.numerics import Accumulate, Granularity, PerBlock, PerRow, PerTensor, QuantizedTensor, hopper_sums, quantize
from tests.contract.gemm_oracle import assert_product, recorded_products

GRANULARITIES: tuple[Granularity, ...] = (PerTensor(), PerRow(), PerBlock(1, 8), PerBlock(8, 8))
PAIRS = [
    *zip(GRANULARITIES, GRANULARITIES, strict=True),
    (PerBlock(1, 8), PerBlock(8, 8)),
    (PerBlock(8, 8), PerBlock(1, 8)),
]
PAIRS += [
    (PerRow(), PerTensor()),
    (PerTensor(), PerBlock(1, 8)),
    (PerBlock(8, 8), PerRow()),
    (PerBlock(1, 8), PerBlock(1, 4)),
]
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 7, 24), (16, 32, 16), (1, 1, 1), (3, 2, 1), (0, 4, 8), (4, 0, 8), (4, 3, 0), (33, 18, 130))


def _codes(rows: int, columns: int, fmt: Format, *, finite: bool = True) -> Tensor:
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
    if finite:
        special = torch.tensor([*fmt.nan_codes, *fmt.inf_codes], dtype=torch.uint8)
        codes = torch.where(torch.isin(codes, special), 0, codes)
    return codes.view(fmt.torch_dtype)


def _operand(codes: Tensor, granularity: Granularity) -> QuantizedTensor:
    # a scale that brings products below float16's maximum, and is no power of two
    scale = torch.rand(granularity.scale_shape(codes.shape)) / torch.finfo(codes.dtype).max
    return QuantizedTensor(codes, scale, granularity, torch.float32)


def _run(
    backend: Backend, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor | None:
    """The product, or None where the backend refuses it, as it then must by name too."""
    problem = MatmulProblem(
        m=a.shape[0],
        n=b.shape[0],
        k=a.shape[1],
        device=a.data.device.type,
        a_dtype=a.data.dtype,
        b_dtype=b.data.dtype,
        a_granularity=a.granularity,
        b_granularity=b.granularity,
        out_dtype=out_dtype,
        bias=bias is not None,
        accumulate=Accumulate.FP32,
    )
    reason = backend.unsupported_reason(problem)
    if reason is None:
        return scaled_mm(a, b, out_dtype=out_dtype, bias=bias, backend=backend.name)
    with pytest.raises(BackendError) as refusal:
        scaled_mm(a, b, out_dtype=out_dtype, bias=bias, backend=backend.name)
    assert backend.name in str(refusal.value)
    assert reason in str(refusal.value)
    return None


def _check(backend: Backend, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype):
    result = _run(backend, a, b, bias, out_dtype)
    if result is None:
        return
    assert result.dtype is out_dtype
    assert_product(result, a, b, bias)


each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@each_backend
@pytest.mark.parametrize(
    "formats", [*itertools.product(FP8_FORMATS, repeat=2)], ids=lambda pair: f"{pair[0]}x{pair[1]}"
)
def test_format_pairs(backend, formats):
    for granularity, out_dtype in itertools.product(GRANULARITIES, OUT_DTYPES):
        a, b = (_operand(_codes(rows, 24, fmt), granularity) for rows, fmt in zip((9, 13), formats, strict=True))
        _check(backend, a, b, torch.randn(13), out_dtype)


@each_backend
@pytest.mark.parametrize("power_of_two", [False, True], ids=["any scale", "powers of two"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
def test_granularity_pairs(backend, pair, power_of_two):
    for K, out_dtype in itertools.product((1, 20, 24), OUT_DTYPES):
        a, b = (_operand(_codes(rows, K, FP8_FORMATS[0]), g) for rows, g in zip((9, 13), pair, strict=True))
        if power_of_two:
            a, b = (replace(q, scale=torch.exp2(torch.log2(q.scale).round())) for q in (a, b))
        _check(backend, a, b, torch.randn(13), out_dtype)


@each_backend
def test_e8m0_scales(backend):
    """Every byte from 2^-60 to 2^60, products within FP32."""
    data = _codes(9, 121 * 2, FP8_FORMATS[0])
    exponents = torch.arange(-60, 61, dtype=torch.int16)
    up, down = ((sign * exponents + 127).to(torch.uint8) for sign in (1, -1))
    a, b = (QuantizedTensor(data, e.expand(9, 121), PerBlock(1, 2), torch.float32) for e in (up, down))
    _check(backend, a, b, None, torch.float32)


@each_backend
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_shapes(backend, shape, biased):
    M, N, K = shape
    for granularity, out_dtype in itertools.product(GRANULARITIES[:2], OUT_DTYPES):
        a = _operand(_codes(M, K, FP8_FORMATS[0]), granularity)
        b = _operand(_codes(N, K, FP8_FORMATS[1]), granularity)
        _check(backend, a, b, torch.randn(N) if biased else None, out_dtype)


@each_backend
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bias_is_added_before_the_only_rounding(backend, bias_dtype):
    # In bfloat16 1024 + 3 + 3 is 1032 when rounded once, and 1024 when 1027 is rounded first.
    ones = QuantizedTensor(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(1027.0), PerTensor(), torch.float32)
    unit = QuantizedTensor(ones.data, torch.tensor(1.0), PerTensor(), torch.float32)
    result = _run(backend, ones, unit, torch.full((1,), 3.0, dtype=bias_dtype), torch.bfloat16)
    assert result is None or result.item() == 1032.0


@each_backend
def test_sums_are_not_rounded_before_the_scale(backend):
    # 1 + 1/256 is no bfloat16; times 256 it is 257, which rounds to 256 in bfloat16 but stays in float32.
    a = QuantizedTensor(
        torch.tensor([[1.0, 2.0**-8]]).to(torch.float8_e5m2), torch.tensor(256.0), PerTensor(), torch.float32
    )
    b = QuantizedTensor(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor(1.0), PerTensor(), torch.float32)
    result = _run(backend, a, b, None, torch.float32)
    assert result is None or result.item() == 257.0


@each_backend
@pytest.mark.parametrize(
    "formats", [*itertools.product(FP8_FORMATS[:2], repeat=2)], ids=lambda pair: f"{pair[0]}x{pair[1]}"
)
def test_every_code_nan_and_infinity_included(backend, formats):
    columns = torch.arange(256, dtype=torch.uint8)
    for granularity in GRANULARITIES[:2]:
        a = _operand(columns[:, None].view(formats[0].torch_dtype), granularity)  # K = 1: each output is one product
        b = _operand(columns[:, None].view(formats[1].torch_dtype), granularity)
        _check(backend, a, b, None, torch.float32)


@each_backend
@pytest.mark.parametrize("granularity", GRANULARITIES[:2], ids=str)
def test_scales_far_apart_meet_in_the_middle(backend, granularity):
    """amaxes of 3e38 and 1e-10: each product is ordinary, but one scale before the other would overflow."""
    a = quantize(torch.randn(5, 24).clamp(-2, 2) * 1.5e38, FP8_FORMATS[0], granularity=granularity)
    b = quantize(torch.randn(7, 24) * 1e-10, FP8_FORMATS[0], granularity=granularity)
    for left, right in ((a, b), (b, a)):
        _check(backend, left, right, None, torch.float32)
    tiny = quantize(torch.randn(7, 24) * 1e-37, FP8_FORMATS[0], granularity=granularity, amax_floor=0.0)
    _check(backend, a, tiny, None, torch.float32)


@each_backend
def test_a_nan_code_touches_its_own_row(backend):
    codes = _codes(4, 8, FP8_FORMATS[0])
    poisoned = codes.view(torch.uint8).clone()
    poisoned[2, 3] = 0xFF
    other = _operand(_codes(3, 8, FP8_FORMATS[0]), PerTensor())
    clean = _operand(codes, PerTensor())
    broken = QuantizedTensor(poisoned.view(codes.dtype), clean.scale, PerTensor(), torch.float32)
    before, after = (_run(backend, operand, other, None, torch.float32) for operand in (clean, broken))
    if before is None or after is None:
        return
    assert after[2].isnan().all()
    rows = torch.tensor([0, 1, 3])
    assert torch.equal(before[rows], after[rows])


@each_backend
def test_transposed_views_are_read_by_their_strides(backend):
    for granularity in (PerTensor(), PerBlock(8, 8)):
        a = _operand(_codes(24, 9, FP8_FORMATS[0]), granularity).t()  # [9, 24]
        b = _operand(_codes(24, 13, FP8_FORMATS[1]), granularity).t()
        assert not a.data.is_contiguous()
        for out_dtype in OUT_DTYPES:
            _check(backend, a, b, None, out_dtype)
    strided = _codes(18, 48, FP8_FORMATS[0])[::2, ::2]
    _check(backend, _operand(strided, PerRow()), _operand(_codes(5, 24, FP8_FORMATS[0]), PerRow()), None, torch.float32)


@each_backend
def test_operands_are_not_written_to(backend):
    a, b = (_operand(_codes(rows, 24, FP8_FORMATS[0], finite=False), PerRow()) for rows in (9, 13))
    bias = torch.randn(13)
    tensors = (a.data.view(torch.uint8), a.scale, b.data.view(torch.uint8), b.scale, bias)
    copies = [tensor.clone() for tensor in tensors]
    _run(backend, a, b, bias, torch.float32)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@each_backend
def test_autocast_changes_nothing(backend):
    a, b = (_operand(_codes(rows, 64, FP8_FORMATS[0]), PerTensor()) for rows in (9, 13))
    for out_dtype in OUT_DTYPES:
        plain = _run(backend, a, b, None, out_dtype)
        with torch.autocast("cpu", torch.bfloat16):
            inside = _run(backend, a, b, None, out_dtype)
        assert plain is None or inside is None or torch.equal(plain, inside)


def test_some_backend_supports_every_product_with_float32_sums():
    for granularity in GRANULARITIES:
        problem = MatmulProblem(
            m=3,
            n=5,
            k=7,
            device="cpu",
            a_dtype=torch.float8_e4m3fnuz,
            b_dtype=torch.float8_e5m2fnuz,
            a_granularity=granularity,
            b_granularity=granularity,
            out_dtype=torch.float16,
            bias=True,
            accumulate=Accumulate.FP32,
        )
        assert explain(problem).backend in {backend.name for backend in BACKENDS}


class TestHopperModel:
    """The sums themselves are proven in tests/oracle; here their scales, bias and rounding."""

    @staticmethod
    def _problem(accumulate: str, a: Granularity, b: Granularity) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
        left, right = _operand(_codes(5, 300, FP8_FORMATS[0]), a), _operand(_codes(7, 300, FP8_FORMATS[1]), b)
        return left, right, scaled_mm(left, right, accumulate=Accumulate(accumulate))

    @pytest.mark.parametrize("accumulate", ["hopper-fast", "hopper-slow"])
    @pytest.mark.parametrize("granularity", GRANULARITIES[:2], ids=str)
    def test_scales_multiply_the_finished_sums(self, accumulate, granularity):
        a, b, y = self._problem(accumulate, granularity, granularity)
        sums = hopper_sums(a.data, b.data, accumulate=Accumulate(accumulate)).double()
        scales = a.scale.reshape(-1, 1).double() * b.scale.reshape(1, -1).double()
        assert torch.equal(y, (sums * scales).float())

    @pytest.mark.parametrize("accumulate", ["hopper-fast", "hopper-slow"])
    def test_block_scales_multiply_each_chain(self, accumulate):
        a, b, y = self._problem(accumulate, PerBlock(1, 128), PerBlock(128, 128))
        expected = torch.zeros(5, 7)
        for block in range(3):
            columns = slice(128 * block, 128 * (block + 1))
            chain = hopper_sums(a.data[:, columns], b.data[:, columns], accumulate=Accumulate.HOPPER_FAST)
            expected += (chain.double() * a.scale[:, block, None].double() * b.scale[0, block].double()).float()
        assert torch.equal(y, expected)

    @pytest.mark.parametrize("accumulate", ["hopper-fast", "hopper-slow"])
    @pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(1, 128)], ids=str)
    def test_the_bias_is_added_before_the_only_rounding(self, granularity, accumulate):
        # As above: 1027 and the bias are rounded to bfloat16 together. One bias an output column.
        shape = granularity.scale_shape(torch.Size([2, 1]))
        codes = torch.ones(2, 1).to(torch.float8_e4m3fn)
        a = QuantizedTensor(codes, torch.full(shape, 1027.0), granularity, torch.bfloat16)
        b = replace(a, scale=torch.ones(shape))
        bias = torch.tensor([3.0, -27.0], dtype=torch.bfloat16)
        assert scaled_mm(a, b, bias=bias, accumulate=Accumulate(accumulate)).tolist() == [[1032.0, 1000.0]] * 2

    def test_backend_is_chosen_only_on_request(self):
        a, b = (_operand(_codes(4, 32, FP8_FORMATS[0]), PerTensor()) for _ in range(2))
        with recorded_products() as products:
            for accumulate in Accumulate:
                scaled_mm(a, b, accumulate=accumulate)
        fp32, *others = [product.backend for product in products]
        assert (fp32 != "hopper_model", others) == (True, ["hopper_model", "hopper_model"])

    def test_accumulation_no_tensor_core_does_is_refused_by_every_backend(self):
        fnuz = _operand(_codes(4, 32, FP8_FORMATS[2]), PerTensor())
        blocks = _operand(_codes(4, 64, FP8_FORMATS[0]), PerBlock(1, 32))
        for q, reason in ((fnuz, "Hopper multiplies E4M3 and E5M2"), (blocks, "scaled every 128 of K, not every 32")):
            with pytest.raises(BackendError, match=f"no backend can run this product: .*hopper_model: .*{reason}"):
                scaled_mm(q, q, accumulate=Accumulate.HOPPER_SLOW)
