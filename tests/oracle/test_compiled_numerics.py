"""The same codes and scales under torch.compile, without a graph break."""

import numpy as np
import pytest
import torch

from octavo.formats import E4M3, E5M2, FP8_FORMATS
from octavo.numerics import Nonfinite, Overflow, PerBlock, PerRow, PerTensor, cast_nearest, quantize
from tests.oracle.rounding_table import all_16_bit, assert_same_codes, expected_codes, float32_edges

# torch.compile imports a module of torch's own that still defines a TorchScript method.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

GRANULARITIES = (PerTensor(), PerRow(), PerBlock(2, 3))


def test_cast_nearest_equals_the_table():
    """Every bfloat16 and float16 input and every float32 edge, in one graph; both choices of both policies."""
    policies = tuple(zip(Overflow, Nonfinite, strict=True))
    edges = [torch.from_numpy(float32_edges(fmt)) for fmt in FP8_FORMATS]
    inputs = [all_16_bit(torch.bfloat16), all_16_bit(torch.float16), torch.cat(edges)]
    encode_scales = [None, None, torch.tensor(1.7)]

    def cast_all(inputs, encode_scales):
        return [
            cast_nearest(x, fmt, scale, overflow=overflow, nonfinite=nonfinite)
            for x, scale in zip(inputs, encode_scales, strict=True)
            for fmt in FP8_FORMATS
            for overflow, nonfinite in policies
        ]

    compiled = iter(torch.compile(cast_all, fullgraph=True)(inputs, encode_scales))
    for x, scale in zip(inputs, encode_scales, strict=True):
        for fmt in FP8_FORMATS:
            for overflow, nonfinite in policies:
                factor = None if scale is None else np.float32(scale.item())
                expected = expected_codes(x.float().numpy(), fmt, factor, overflow=overflow, nonfinite=nonfinite)
                assert_same_codes(next(compiled), expected, fmt)


def test_quantize_equals_eager():
    """Ragged blocks, a zero row, an infinity and a NaN; bfloat16, so that the amax crosses dtypes."""
    x = torch.randn(5, 7).bfloat16()
    x[1], x[2, 3], x[4, 0] = 0, float("inf"), float("nan")

    def quantize_all(x):
        quantized = [
            quantize(x, fmt, granularity=granularity, power_of_two=power_of_two)
            for fmt in (E4M3, E5M2)
            for granularity in GRANULARITIES
            for power_of_two in (False, True)
        ]
        return [(q.data, q.scale, q.dequantize()) for q in quantized]

    formats = [fmt for fmt in (E4M3, E5M2) for _ in range(2 * len(GRANULARITIES))]
    results = zip(torch.compile(quantize_all, fullgraph=True)(x), quantize_all(x), formats, strict=True)
    for compiled, eager, fmt in results:
        assert_same_codes(compiled[0], eager[0].view(torch.uint8).numpy(), fmt)
        assert torch.equal(compiled[1].view(torch.int32), eager[1].view(torch.int32))
        assert torch.equal(compiled[2].nan_to_num(1e9), eager[2].nan_to_num(1e9))
