"""Block-scaled products in the published order of scales and sums, by a slow loop.

On Hopper each 128 of K is a chain of its own, and the FP32 total goes on as fma(chain · s₁, s₂, total), s₁ the scale of
the operand in 1x128 tiles and s₂ that of the other: cuBLAS's 1D x 2D, 2D x 1D and 1D x 1D, which Transformer Engine's
tests write down (references/blockwise_fp8_gemm_reference.py; DeepSeek-V3, arXiv 2412.19437 §3.3.2). A power of two
rounds nothing, so that any order gives the same bits; of other scales each product may round once more.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo
from octavo.formats import E4M3
from octavo.numerics import Accumulate, PerBlock, QuantizedTensor, ScaleRounding, hopper_sums, quantize

TILE, BLOCK = PerBlock(1, 128), PerBlock(128, 128)
ORDERS = {"1D x 2D": (TILE, BLOCK), "2D x 1D": (BLOCK, TILE), "1D x 1D": (TILE, TILE)}
SHAPE = (130, 70, 300)  # M, N, K: no side is a whole number of blocks


def _operands(order: str, rounding: ScaleRounding) -> tuple[QuantizedTensor, QuantizedTensor]:
    m, n, k = SHAPE
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(rows, k, generator=generator) * torch.randn(rows, k, generator=generator).exp() for rows in (m, n)
    )
    left, right = ORDERS[order]
    return (
        quantize(a, E4M3, granularity=left, scale_rounding=rounding),
        quantize(b, E4M3, granularity=right, scale_rounding=rounding),
    )


def _published(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """Chain by chain; the fused multiply-add by FP64, where its product is exact."""
    total = np.zeros(SHAPE[:2], dtype=np.float32)
    scales = [q.granularity.expand(q.scale, q.shape).broadcast_to(q.shape).numpy() for q in (a, b)]
    for first in range(0, SHAPE[2], 128):
        part = slice(first, first + 128)
        chain = hopper_sums(a.data[:, part], b.data[:, part], accumulate=Accumulate.HOPPER_SLOW).numpy()
        of_a, of_b = scales[0][:, first, None], scales[1][None, :, first]
        inner, outer = (of_b, of_a) if a.granularity == BLOCK else (of_a, of_b)
        total = ((chain * inner).astype(np.float64) * outer + total).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize("order", ORDERS)
def test_powers_of_two_give_the_published_bits(order: str) -> None:
    a, b = _operands(order, ScaleRounding.RCEIL)
    assert torch.equal(
        octavo.scaled_mm(a, b, out_dtype=torch.float32, accumulate=Accumulate.HOPPER_SLOW), _published(a, b)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_other_scales_round_once_more_a_block_at_most(order: str) -> None:
    a, b = _operands(order, ScaleRounding.FP32)
    found, wanted = octavo.scaled_mm(a, b, out_dtype=torch.float32, accumulate=Accumulate.HOPPER_SLOW), _published(a, b)
    magnitudes = a.dequantize().double().abs() @ b.dequantize().double().abs().t()
    blocks = -(-SHAPE[2] // 128)
    assert ((found.double() - wanted.double()).abs() <= 2 * blocks * 2.0**-24 * magnitudes).all()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_recipe_multiplies_the_operand_in_tiles_by_the_weight_s_blocks(power_of_two: bool) -> None:
    """Output and grad_input are 1D x 2D, grad_weight is 1D x 1D: the order a, b is the published one of each."""
    recipe = octavo.recipes.get("blockwise", power_of_two=power_of_two)
    granularities = [cast.granularity for cast in recipe.casts]
    assert granularities == [TILE, BLOCK, TILE, BLOCK, TILE, TILE]
    assert {gemm.accumulate for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight)} == {"hopper-slow"}
