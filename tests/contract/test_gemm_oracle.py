"""What the oracle of GEMMs lets pass, and what not."""

import pytest
import torch

from tests.contract.gemm_oracle import assert_product


def test_a_product_may_be_rounded_before_the_bias_is_added_where_that_is_said_and_no_more_often():
    a, b, bias = torch.randn(33, 300).bfloat16(), torch.randn(303, 300).bfloat16(), torch.randn(303).bfloat16()
    product = a.float() @ b.float().t()
    once = (product + bias.float()).bfloat16()
    twice = product.bfloat16() + bias
    halves = [(x.float() @ y.float().t()).bfloat16() for x, y in zip(a.split(150, 1), b.split(150, 1), strict=True)]
    assert_product(once, a, b, bias)
    with pytest.raises(AssertionError, match="worst excess"):
        assert_product(twice, a, b, bias)
    assert_product(twice, a, b, bias, rounds_product=True)
    with pytest.raises(AssertionError, match="worst excess"):
        assert_product(halves[0] + halves[1] + bias, a, b, bias, rounds_product=True)
    with pytest.raises(AssertionError, match="worst excess"):
        assert_product(halves[0] + halves[1], a, b, rounds_product=True)
