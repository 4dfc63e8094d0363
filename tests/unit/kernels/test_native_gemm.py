"""What is looked at before a native product gets its addresses."""

import re
from functools import partial

import numpy as np
import pytest
import torch

import octavo
from octavo.errors import BackendError
from octavo.kernels import native_bindings, native_gemm
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor

pytestmark = pytest.mark.skipif(
    native_bindings.why_absent() is not None, reason=f"no native kernels: {native_bindings.why_absent()}"
)

A = torch.ones(4, 160).to(torch.float8_e4m3fn)
B = torch.ones(8, 160).to(torch.float8_e5m2)
ONE = torch.ones(1, 1)


def gemm(*, a=A, b=B, a_scale=ONE, b_scale=ONE, out_dtype=torch.float32, bias=None, block=0):
    return torch.ops.octavo.native_mm(a, a_scale, b, b_scale, bias, out_dtype, block)


def sums(*, a=A, b=B, accumulate="hopper-slow", a_scale=None, b_scale=None):
    return torch.ops.octavo.hopper_sums(a, b, accumulate, a_scale, b_scale)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: gemm(b=B[:, :8]), "takes [M, K] and [N, K], not (4, 160) and (8, 8)"),
    (lambda: gemm(a=A[0]), "takes [M, K] and [N, K], not (160,) and (8, 160)"),
    (lambda: gemm(a=A.view(torch.uint8)), "bfloat16, float16, not uint8, float8_e5m2"),
    (lambda: gemm(a=A.float().to(torch.float8_e4m3fnuz)), "bfloat16, float16, not float8_e4m3fnuz, float8_e5m2"),
    (lambda: gemm(a=A[:, :0], b=B[:, :0]), "an empty operand has no product: (4, 0) and (8, 0)"),
    (lambda: gemm(a=A[:0]), "an empty operand has no product: (0, 160)"),
    (lambda: gemm(a_scale=torch.ones(3, 1)), "4 rows in 1 blocks and scales (3, 1)"),
    (lambda: gemm(a_scale=torch.ones(1)), "4 rows in 1 blocks and scales (1,)"),
    (lambda: gemm(b_scale=torch.ones(8, 3), block=128), "8 rows in 2 blocks and scales (8, 3)"),
    (lambda: gemm(b_scale=torch.ones(8, 2), block=160), "8 rows in 1 blocks and scales (8, 2)"),
    (lambda: gemm(bias=torch.ones(7)), "8 columns and a bias (7,)"),
    (lambda: gemm(bias=torch.ones(8, 1)), "8 columns and a bias (8, 1)"),
    (lambda: gemm(block=-3), "a block is 1 column wide or more, not -3"),
    (lambda: gemm(out_dtype=torch.int32), "a product is float32, bfloat16, float16, not torch.int32"),
    (lambda: sums(b=B[:, :32]), "takes [M, K] and [N, K], not (4, 160) and (8, 32)"),
    (lambda: sums(a=A.float()), "operands of float8_e4m3fn, float8_e5m2, not float32, float8_e5m2"),
    (lambda: sums(accumulate=Accumulate.FP32), "tensor cores sum hopper-fast or hopper-slow, not"),
    (lambda: sums(a_scale=torch.ones(2, 1), b_scale=ONE), "4 rows in 2 blocks and scales (2, 1)"),
    (lambda: sums(a_scale=torch.ones(4, 3), b_scale=ONE), "4 rows in 2 blocks and scales (4, 3)"),
    (lambda: sums(a_scale=ONE), "give both scales or neither"),
    (lambda: sums(a_scale=ONE, b_scale=ONE, accumulate="hopper-fast"), "it is hopper-slow's chains that are scaled"),
])  # fmt: skip
def test_operators_called_by_name_refuse_what_does_not_fit(call, words):
    with pytest.raises(BackendError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("block", [160, 161, 2**30, 2**62, 2**63 - 1])
def test_a_block_as_wide_as_k_is_one_scale(block):
    for a in (A, torch.ones(40, 160).to(A.dtype)):
        for out_dtype in (torch.float32, torch.bfloat16):
            a_scale = torch.rand(len(a), 1)
            found = gemm(a=a, a_scale=a_scale, block=block, out_dtype=out_dtype)
            assert torch.equal(found, gemm(a=a, a_scale=a_scale, out_dtype=out_dtype))


@pytest.mark.parametrize("side", [2**30, 2**62, 2**63 - 1])
def test_blocks_may_be_larger_than_the_operands(side):
    x, weight, bias = torch.randn(4, 64), torch.randn(70, 64), torch.randn(70)
    for block, same in ((PerBlock(1, side), PerRow()), (PerBlock(side, side), PerTensor())):
        operands = ([octavo.quantize(t, octavo.E4M3, granularity=g) for t in (x, weight)] for g in (block, same))
        found, wanted = (octavo.scaled_mm(*pair, bias=bias, backend="native") for pair in operands)
        assert torch.equal(found, wanted)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


@pytest.mark.parametrize("accumulate", ["fp32", "hopper-fast", "hopper-slow"])
def test_scales_and_bias_may_have_no_memory_of_their_own(accumulate):
    a, b = (octavo.quantize(torch.randn(rows, 160), octavo.E4M3, granularity=PerBlock(1, 128)) for rows in (4, 8))
    multiply = partial(octavo.scaled_mm, accumulate=accumulate, out_dtype=torch.float32)
    biases, scales = torch.randn(3, 8), torch.rand(3, *b.scale.shape) + 0.5

    def scaled(scale):
        return QuantizedTensor(b.data, scale, b.granularity, b.hp_dtype)

    found = torch.func.vmap(lambda bias: multiply(a, b, bias=bias))(biases)
    assert torch.equal(found, torch.stack([multiply(a, b, bias=bias) for bias in biases]))
    found = torch.func.vmap(lambda scale: multiply(a, scaled(scale)))(scales)
    assert torch.equal(found, torch.stack([multiply(a, scaled(scale)) for scale in scales]))
    wanted = multiply(a, scaled(scales[0]), bias=biases[0])
    for bias, scale in ((biases[0].as_subclass(Named), scales[0]), (biases[0], scales[0].as_subclass(Named))):
        assert torch.equal(multiply(a, scaled(scale), bias=bias), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scales_of_other_dtypes_are_converted(dtype):
    a_scale, b_scale = torch.tensor([[0.5], [2.0], [1.0], [4.0]]), torch.tensor([[8.0]])
    plain = gemm(a_scale=a_scale, b_scale=b_scale)
    assert torch.equal(plain, gemm(a_scale=a_scale.to(dtype), b_scale=b_scale.to(dtype)))
    assert torch.equal(plain, 160 * 8 * a_scale.expand(4, 8))
    assert torch.equal(sums(a_scale=a_scale.to(dtype), b_scale=b_scale.to(dtype)), plain)


def test_gemm_reads_negated_operands_and_bias():
    negative = torch._neg_view(torch.ones(8))
    assert torch.equal(gemm(bias=negative), gemm(bias=-torch.ones(8)))
    x = torch._neg_view(torch.ones(4, 160))
    assert torch.equal(native_gemm.gemm(x, B, out_dtype=torch.float32), -160 * torch.ones(4, 8))


def test_no_products_give_zeros():
    assert torch.equal(sums(a=A[:, :0], b=B[:, :0]), torch.zeros(4, 8))


@pytest.mark.parametrize("accumulate", Accumulate)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [0, 32, 1000])
def test_a_comparison_is_three_products(block, dtype, accumulate):
    """To the bit those of the kernels that train, whatever the operands' strides."""
    x, w = torch.randn(200, 36).to(dtype).t()[::3], torch.randn(30, 200)[::3]
    granularity = PerBlock(1, block) if block else PerRow()
    left, right = (octavo.quantize(side, octavo.E4M3, granularity=granularity) for side in (x, w))
    codes, scales = (torch.cat([left.data] * 2, 1).t()[:200].t(), right.data), (left.scale.float(), right.scale.float())
    for level in native_bindings.levels():
        found, sums = native_gemm.compare((x, w), codes, scales, block=block, accumulate=accumulate, level=level)
        wanted, exact, cut = found.double().numpy()
        errors = (np.sign(exact) * (cut - exact)).sum()
        totals = [(wanted**2).sum(), ((exact - wanted) ** 2).sum(), np.abs(exact).sum(), errors]
        np.testing.assert_allclose(sums, totals, rtol=1e-9)
        both = {"a_scale": scales[0], "b_scale": scales[1], "out_dtype": torch.float32, "block": block, "level": level}
        assert torch.equal(found[0], native_gemm.gemm(x, w, out_dtype=torch.float32, level=level))
        assert torch.equal(found[1], native_gemm.gemm(*codes, **both))
        if block or accumulate is Accumulate.FP32:
            assert found[2].isnan().all()
            continue
        chains = native_gemm.hopper_sums(*codes, accumulate=accumulate, level=level)
        assert torch.equal(found[2], (chains * scales[0].double() * scales[1].double().t()).float())


def test_a_comparison_of_what_does_not_go_together_is_refused():
    originals, scales = (A.float(), B.float()), (ONE, ONE)

    def compare(originals=originals, codes=(A, B), scales=scales):
        return native_gemm.compare(originals, codes, scales, block=0, accumulate=Accumulate.FP32)

    for options, words in (
        ({"originals": (A.float()[:2], B.float())}, "codes (4, 160) and (8, 160) have originals of their shapes"),
        ({"originals": (A.float(), B.float()[:1])}, "have originals of their shapes, not [(4, 160), (1, 160)]"),
        ({"originals": (A.double(), B.float())}, "operands of float32, bfloat16, float16, not float64"),
        ({"codes": (A.float(), B)}, "operands of float8_e4m3fn, float8_e5m2, not float32"),
        ({"scales": (torch.ones(3, 1), ONE)}, "4 rows in 1 blocks and scales (3, 1)"),
        ({"originals": (A.float()[:0], B.float()), "codes": (A[:0], B)}, "none is empty"),
    ):
        with pytest.raises(BackendError, match=re.escape(words)):
            compare(**options)
