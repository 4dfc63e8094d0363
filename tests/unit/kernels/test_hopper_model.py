"""Which products the model of Hopper's tensor cores computes, and where it puts scales and bias."""

import pytest
import torch

import octavo
from octavo.kernels.hopper_model import HopperModelBackend
from octavo.numerics import Accumulate, PerBlock, PerRow, hopper_sums
from tests.unit.kernels.matmul_problem import PROBLEM

FAST = PROBLEM._replace(accumulate=Accumulate.HOPPER_FAST)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"device": "cuda"}, None),
        ({"a_granularity": PerBlock(1, 128), "b_granularity": PerRow()}, None),
        ({"accumulate": Accumulate.FP32}, "FP32 sums were asked for"),
        ({"a_granularity": PerBlock(1, 32)}, "every 128 of K, not every 32"),
        ({"b_dtype": torch.float8_e5m2fnuz}, "Hopper multiplies E4M3 and E5M2"),
    ],
    ids=str,
)
def test_unsupported_problems_give_a_reason(changes, words):
    reason = HopperModelBackend().unsupported_reason(FAST._replace(**changes))
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize("how", [Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW])
def test_scales_and_bias_come_after_the_sums(how):
    """One rounding after the tensor core's own: the float64 product of its sums and the scales is what is rounded."""
    a, b = (octavo.quantize(torch.randn(rows, 300), octavo.E4M3, granularity=PerRow()) for rows in (4, 5))
    bias = torch.randn(5)
    sums = hopper_sums(a.data, b.data, accumulate=how).double() * a.scale.double() * b.scale.double().t()
    for added in (None, bias):
        product = octavo.scaled_mm(a, b, bias=added, out_dtype=torch.float32, accumulate=how, backend="hopper_model")
        assert torch.equal(product, (sums if added is None else sums + added).float())
