"""The same codes and scales under torch.compile, without a graph break."""

from typing import Any

import numpy as np
import pytest
import torch

from octavo.formats import E4M3, E5M2, FP8_FORMATS, Format
from octavo.numerics import (
    Granularity,
    Nonfinite,
    Overflow,
    PerBlock,
    PerRow,
    PerTensor,
    ScaleRounding,
    cast_nearest,
    quantize,
)
from tests.oracle.rounding_table import all_16_bit, assert_same_codes, expected_codes, float32_edges

# torch.compile imports a module of torch's own that still defines a TorchScript method.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

PLAIN: Any = {"overflow": Overflow.SATURATE, "nonfinite": Nonfinite.PROPAGATE}
OTHER: Any = {"overflow": Overflow.NONFINITE, "nonfinite": Nonfinite.SATURATE}


@pytest.mark.long
def test_cast_nearest_equals_the_table():
    """Every bfloat16 and float16 input and every float32 edge, in one graph; the edges under the other policies too."""
    edges = torch.cat([torch.from_numpy(float32_edges(fmt)) for fmt in FP8_FORMATS])
    inputs = [all_16_bit(torch.bfloat16), all_16_bit(torch.float16), edges, edges]
    encode_scales = [None, None, torch.tensor(1.7), None]
    policies = [PLAIN, PLAIN, PLAIN, OTHER]

    def cast_all(inputs, encode_scales):
        return [
            cast_nearest(x, fmt, scale, **policy)
            for x, scale, policy in zip(inputs, encode_scales, policies, strict=True)
            for fmt in FP8_FORMATS
        ]

    compiled = iter(torch.compile(cast_all, fullgraph=True)(inputs, encode_scales))
    for x, scale, policy in zip(inputs, encode_scales, policies, strict=True):
        for fmt in FP8_FORMATS:
            factor = None if scale is None else np.float32(scale.item())
            assert_same_codes(next(compiled), expected_codes(x.float().numpy(), fmt, factor, **policy), fmt)


@pytest.mark.long
def test_quantize_equals_eager():
    """Ragged blocks, a zero row, an infinity and a NaN; bfloat16, so that the amax crosses dtypes."""
    x = torch.randn(5, 7).bfloat16()
    x[1], x[2, 3], x[4, 0] = 0, float("inf"), float("nan")
    cases: list[tuple[Format, Granularity, ScaleRounding]] = [
        (E4M3, PerTensor(), ScaleRounding.FP32),
        (E5M2, PerRow(), ScaleRounding.RCEIL),
        (E4M3, PerBlock(2, 3), ScaleRounding.FLOOR),
        (E5M2, PerBlock(1, 3), ScaleRounding.EVEN),
    ]

    def quantize_all(x):
        quantized = [quantize(x, fmt, granularity=groups, scale_rounding=rounding) for fmt, groups, rounding in cases]
        return [(q.data, q.scale, q.dequantize()) for q in quantized]

    results = zip(cases, torch.compile(quantize_all, fullgraph=True)(x), quantize_all(x), strict=True)
    for (fmt, *_), compiled, eager in results:
        assert_same_codes(compiled[0], eager[0].view(torch.uint8).numpy(), fmt)
        assert torch.equal(compiled[1].view(torch.int32), eager[1].view(torch.int32))
        torch.testing.assert_close(compiled[2], eager[2], rtol=0, atol=0, equal_nan=True)
